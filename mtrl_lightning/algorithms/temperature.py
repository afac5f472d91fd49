"""The weight of the entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError


class Temperature(nn.Module):
    """Learn the weight ``alpha`` of the entropy; built by a factory ``(num_tasks) -> Temperature``.

    Args:
        num_tasks: number of tasks, ``T``.
        initial: value at the start, above 0.
        per_task: one temperature per task ("disentangled alphas" in mtrl) or one for all.
    """

    def __init__(self, num_tasks: int, *, initial: float = 1.0, per_task: bool = True) -> None:
        super().__init__()
        if not initial > 0:
            raise ConfigurationError(f"the initial temperature is {initial}: give a number above 0")
        self._num_tasks = num_tasks
        self.per_task = per_task
        num_temperatures = num_tasks if per_task else 1
        self.log_alpha = nn.Parameter(torch.full((num_temperatures,), math.log(initial)))

    def forward(self, task_B: Tensor) -> Tensor:
        """Return ``log alpha`` of each task of ``[B]``."""
        return self.log_alpha.expand(self._num_tasks)[task_B]

    def values(self) -> Tensor:
        """Return ``alpha`` of every task, ``[T]``."""
        return self.log_alpha.detach().exp().expand(self._num_tasks)
