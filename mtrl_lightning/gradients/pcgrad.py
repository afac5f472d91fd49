"""PCGrad: project conflicting gradients.

Yu et al. 2020, "Gradient Surgery for Multi-Task Learning".

Shapes: ``R`` trained tasks, ``O`` other tasks (``R - 1``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.task_gradients import TaskGradients, equal_weights
from mtrl_lightning.utils.devices import CPU


class PCGrad(GradientMethod):
    """Remove from each task's gradient the components that oppose other tasks (algorithm 1).

    For each ``g_i``, over the other tasks in random order: if ``g_i . g_j < 0``, subtract from
    ``g_i`` its projection onto the original ``g_j``. The update is the mean of the projected
    gradients; the paper uses their sum, which is ``R`` times larger.

    The method costs one backward pass per task. Parameters that are not shared get the gradient of
    the mean loss.

    Args:
        spec: the tasks.
    """

    averages_gradients = True

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every parameter's ``.grad``; the generator samples the orders."""
        gradients = TaskGradients.from_losses(loss_R, parameters)
        order_RO = orders(len(loss_R), generator, loss_R.device)
        _, self._statistics = gradients.combine_with(
            lambda gram_RR: projected(gram_RR, order_RO).mean(0),
            equal_weights(len(loss_R), loss_R.device),
        )


def orders(num_tasks: int, generator: torch.Generator, device: torch.device = CPU) -> Tensor:
    """Sample for every task an order of the other tasks, ``[R, R - 1]``."""
    # sorting uniform keys gives random orders; a key of 2 puts the task itself last
    shape = (num_tasks, num_tasks)
    key_RR = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
    return key_RR.fill_diagonal_(2).argsort(1)[:, :-1]


def projected(gram_RR: Tensor, order_RO: Tensor) -> Tensor:
    """Return the projected gradients as coefficients of the original ones, ``[R, R]``."""
    each_R = torch.arange(len(gram_RR), device=gram_RR.device)
    coefficient_RR = torch.eye(len(gram_RR), dtype=gram_RR.dtype, device=gram_RR.device)
    # g_i is represented by its coefficients, so the loop does not need the gradients themselves
    for other_R in order_RO.unbind(1):
        # g_i . g_j for one j per task i
        product_R = (coefficient_RR * gram_RR[other_R]).sum(1)
        # where they conflict: g_i <- g_i - (g_i . g_j) / ||g_j||^2 g_j
        step_R = torch.where(product_R < 0, product_R / gram_RR.diagonal()[other_R], 0.0)
        coefficient_RR[each_R, other_R] -= step_R
    return coefficient_RR
