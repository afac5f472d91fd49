"""Project conflicting gradients (Yu et al. 2020, "Gradient Surgery for Multi-Task Learning").

Shapes: ``T`` trained tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.task_gradients import TaskGradients, equal_shares


class PCGrad(GradientMethod):
    """Take from each task's gradient what points against another's (algorithm 1).

    For each ``g_i``, over the others in random order: if ``g_i . g_j < 0``, subtract from ``g_i``
    its projection on the original ``g_j``. The mean of what remains is followed, where the paper
    has the sum: ``T`` times as much. It costs one pass a task. Parameters that tasks do not share
    get the gradient of the mean loss.

    Args:
        num_tasks: number of trained tasks, ``T``.
    """

    def backward(
        self, loss_T: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set the gradients; the orders are drawn from the generator."""
        gradients = TaskGradients.of(loss_T, parameters)
        order_TO, share_T = orders(len(loss_T), generator), equal_shares(len(loss_T))
        _, self._statistics = gradients.follow(
            lambda gram_TT: projected(gram_TT, order_TO).mean(0), share_T
        )


def orders(num_tasks: int, generator: torch.Generator) -> Tensor:
    """Draw for every task an order of the others, ``[T, T - 1]``."""
    key_TT = torch.rand(num_tasks, num_tasks, generator=generator, dtype=torch.float64)
    return key_TT.fill_diagonal_(2).argsort(1)[:, :-1]


def projected(gram_TT: Tensor, order_TO: Tensor) -> Tensor:
    """Return the projected gradients as coefficients of the original ones, ``[T, T]``."""
    each_T = torch.arange(len(gram_TT))
    coefficient_TT = torch.eye(len(gram_TT), dtype=gram_TT.dtype)
    for other_T in order_TO.unbind(1):
        product_T = (coefficient_TT * gram_TT[other_T]).sum(1)
        step_T = torch.where(product_T < 0, product_T / gram_TT.diagonal()[other_T], 0.0)
        coefficient_TT[each_T, other_T] -= step_T
    return coefficient_TT
