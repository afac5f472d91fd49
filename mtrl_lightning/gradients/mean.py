"""The mean of the tasks' losses."""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl_lightning.gradients.method import GradientMethod, TaskParameters


class Mean(GradientMethod):
    """Use the gradient of the mean loss, which is the gradient of the whole batch.

    Args:
        spec: the tasks.
    """

    is_one_pass = True
    depends_on_values = False

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Add the gradient of the mean loss to every parameter's ``.grad``."""
        loss_R.mean().backward()
