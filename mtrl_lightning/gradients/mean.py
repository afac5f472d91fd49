"""The mean of the tasks' losses."""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl_lightning.gradients.method import GradientMethod, TaskParameters


class Mean(GradientMethod):
    """Follow the gradient of the mean loss, which is that of the whole batch.

    Args:
        num_tasks: number of trained tasks, ``T``.
    """

    is_one_pass = True

    def backward(
        self, loss_T: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Add the gradient of the mean loss to every parameter's ``.grad``."""
        loss_T.mean().backward()
