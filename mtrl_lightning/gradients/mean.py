"""The mean of the tasks' losses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Parameter

from mtrl_lightning.gradients.method import GradientMethod


class Mean(GradientMethod):
    """Follow the gradient of the mean loss, which is that of the whole batch.

    Args:
        num_tasks: number of trained tasks, ``T``.
    """

    def backward(self, loss_T: Tensor, shared: Sequence[Parameter]) -> None:
        """Add the gradient of the mean loss to every parameter's ``.grad``."""
        loss_T.mean().backward()
