"""What the methods that learn a weight for each loss share: losses above zero, and the weights' optimizer.

Shapes: ``T`` trained tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ShiftedLosses(nn.Module):
    """Shift losses that can be negative, such as an actor's, so that ratios and logarithms of them mean something.

    A task whose losses were never negative keeps them: a critic's are those of the papers. Else,
    with ``m`` the lowest loss seen, ``2 m - 1`` is subtracted, so that what remains is at least
    ``|m| + 1``: above zero, and in proportion to the values' scale.

    Args:
        num_tasks: number of trained tasks, ``T``.
    """

    lowest_T: Tensor

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.register_buffer("lowest_T", torch.zeros(num_tasks))

    def observe(self, loss_T: Tensor) -> None:
        """Take note of losses; those that are not finite are passed over."""
        lower_T = torch.minimum(self.lowest_T, loss_T.detach())
        self.lowest_T.copy_(torch.where(torch.isfinite(loss_T), lower_T, self.lowest_T))

    def forward(self, loss_T: Tensor) -> Tensor:
        """Return losses ``[T]`` above what was seen, shifted by the same whenever they are from."""
        return loss_T - torch.where(self.lowest_T < 0, 2 * self.lowest_T - 1, 0.0)


class WeightOptimizer(nn.Module):
    """Adam (Kingma & Ba 2015) for one vector, with its moments in the module's state.

    Args:
        num_tasks: number of trained tasks, ``T``.
        lr: learning rate, above 0.
    """

    first_T: Tensor
    second_T: Tensor
    count: Tensor

    def __init__(self, num_tasks: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.register_buffer("first_T", torch.zeros(num_tasks))
        self.register_buffer("second_T", torch.zeros(num_tasks))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, gradient_T: Tensor) -> Tensor:
        """Return what to subtract for a gradient ``[T]``, and count it; one that is not finite is passed over, with 0.

        The device itself finds that out, and is not waited for.
        """
        is_finite = torch.isfinite(gradient_T).all()
        self.count.add_(is_finite)
        self.first_T.copy_(torch.where(is_finite, self.first_T.lerp(gradient_T, 0.1), self.first_T))
        self.second_T.copy_(
            torch.where(is_finite, self.second_T.lerp(gradient_T.square(), 0.001), self.second_T)
        )
        mean_T = self.first_T / (1 - 0.9**self.count)
        step_T = self.lr * mean_T / ((self.second_T / (1 - 0.999**self.count)).sqrt() + 1e-8)
        return torch.where(is_finite, step_T, 0.0)
