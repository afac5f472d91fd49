"""The weight of the entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mtrl_lightning.checks import above
from mtrl_lightning.networks import TaskAxis
from mtrl_lightning.networks.network import task_values
from mtrl_lightning.spec import EnvSpec


class Temperature(nn.Module):
    """Learn the weight ``alpha`` of the entropy; built by a factory ``(spec) -> Temperature``.

    Args:
        spec: the tasks.
        initial: value at the start, above 0.
        per_task: one temperature per task ("disentangled alphas" in mtrl) or one for all.
    """

    is_learned = True
    """Whether the value changes with the policy's entropy."""
    log_alpha: Tensor

    def __init__(self, spec: EnvSpec, *, initial: float = 1.0, per_task: bool = True) -> None:
        super().__init__()
        above(0, initial=initial, prefix="the temperature's ")
        self._num_tasks = spec.num_tasks
        self.per_task = per_task
        num_temperatures = spec.num_tasks if per_task else 1
        self.log_alpha = nn.Parameter(torch.full((num_temperatures,), math.log(initial)))

    def forward(self, tasks: Tensor) -> Tensor:
        """Return ``log alpha`` of tasks, in their shape."""
        return task_values(self.log_alpha.expand(self._num_tasks), tasks)

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the temperatures if each task has its own."""
        return {"log_alpha": TaskAxis()} if self.per_task else {}

    def values(self) -> Tensor:
        """Return ``alpha`` of every task, ``[T]``."""
        return self.log_alpha.detach().exp().expand(self._num_tasks)


class FixedTemperature(Temperature):
    """Keep the weight ``alpha`` of the entropy at one value, for all tasks.

    Args:
        spec: the tasks.
        value: the weight, above 0.
    """

    is_learned = False

    def __init__(self, spec: EnvSpec, *, value: float = 0.1) -> None:
        above(0, value=value, prefix="the fixed temperature's ")
        super().__init__(spec, initial=value, per_task=False)
        log_alpha = self.log_alpha.detach()
        del self.log_alpha
        # not saved: a continued run has the value of its configuration
        self.register_buffer("log_alpha", log_alpha, persistent=False)
