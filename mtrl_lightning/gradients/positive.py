"""Components of methods that learn one weight per loss: positive losses, weight optimizer.

Shapes: ``R`` trained tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ShiftedLosses(nn.Module):
    """Shift losses that can be negative above zero, so that ratios and logarithms are defined.

    An actor's losses can be negative. A task whose losses were never negative is not shifted, like
    a critic's losses in the papers. Otherwise, with ``m`` the lowest loss seen, ``2 m - 1`` is
    subtracted. The result is at least ``|m| + 1``: positive, and proportional to the scale of the
    losses.

    Args:
        num_tasks: number of trained tasks, ``R``.
    """

    lowest_R: Tensor

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.register_buffer("lowest_R", torch.zeros(num_tasks))

    def observe(self, loss_R: Tensor) -> None:
        """Update the lowest loss seen; losses that are not finite are ignored."""
        lower_R = torch.minimum(self.lowest_R, loss_R.detach())
        self.lowest_R.copy_(torch.where(torch.isfinite(loss_R), lower_R, self.lowest_R))

    def forward(self, loss_R: Tensor) -> Tensor:
        """Shift losses ``[R]``; losses of different updates are shifted by the same amount."""
        return loss_R - torch.where(self.lowest_R < 0, 2 * self.lowest_R - 1, 0.0)


class WeightOptimizer(nn.Module):
    """Adam (Kingma & Ba 2015) for one vector, with its moments in the module's state.

    Args:
        num_tasks: number of trained tasks, ``R``.
        lr: learning rate, above 0.
    """

    first_R: Tensor
    second_R: Tensor
    count: Tensor

    def __init__(self, num_tasks: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.register_buffer("first_R", torch.zeros(num_tasks))
        self.register_buffer("second_R", torch.zeros(num_tasks))
        self.register_buffer("count", torch.tensor(0.0))

    def forward(self, gradient_R: Tensor) -> Tensor:
        """Return the step to subtract for a gradient ``[R]``.

        A non-finite gradient gives a step of 0 and leaves the moments unchanged; this is decided on
        the device, without GPU synchronization.
        """
        is_finite = torch.isfinite(gradient_R).all()
        self.count.add_(is_finite)
        self.first_R.copy_(torch.where(is_finite, self.first_R.lerp(gradient_R, 0.1), self.first_R))
        self.second_R.copy_(
            torch.where(is_finite, self.second_R.lerp(gradient_R.square(), 0.001), self.second_R)
        )
        # Adam's bias correction, with beta_1 = 0.9 and beta_2 = 0.999
        mean_R = self.first_R / (1 - 0.9**self.count)
        step_R = self.lr * mean_R / ((self.second_R / (1 - 0.999**self.count)).sqrt() + 1e-8)
        return torch.where(is_finite, step_R, 0.0)
