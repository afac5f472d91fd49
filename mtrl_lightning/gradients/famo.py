"""Weights that let all losses fall at the same rate (Liu et al. 2023, "FAMO: Fast Adaptive Multitask Optimization").

Shapes: ``T`` trained tasks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.positive import ShiftedLosses, WeightOptimizer
from mtrl_lightning.gradients.task_gradients import weight_statistics

LOWEST_LOSS = 1e-8
"""Added to the losses, which are divided by (the paper's value)."""


class FAMO(GradientMethod):
    """Follow the gradient of ``c sum_i z_i log D_i``, with weights ``z = softmax(xi)`` (algorithm 1).

    ``D_i`` is the loss, shifted where it can be negative (``ShiftedLosses``), and
    ``c = 1 / sum_i (z_i / D_i)`` is held constant: task ``i`` has the weight ``c z_i / D_i``, and
    the weights add up to 1 as the mean's do. After the optimizer's step, ``xi`` falls along
    ``J' delta + decay xi``, with ``J`` the softmax's derivative and ``delta_i`` the fall of
    ``log D_i`` on the same batch: weight goes to the task that improved least.

    It does not depend on the losses' scale, so that a task's weighting is without effect, but for
    0, which leaves it out.

    The loss of a task is weighted for all parameters, also for those that tasks do not share. It
    costs one pass, and one more computation of the losses.

    Args:
        num_tasks: number of trained tasks, ``T``.
        lr: learning rate of ``xi``, with Adam, above 0 (``beta`` in the paper; 0.025).
        decay: weight decay of ``xi``, at least 0 (``gamma`` in the paper; 0.001 or 0.01, in its
            MT10 command 0.01).

    Raises:
        ConfigurationError: if lr is not above 0 or decay negative.
    """

    is_one_pass = True
    logit_T: Tensor

    def __init__(self, num_tasks: int, *, lr: float = 0.025, decay: float = 0.01) -> None:
        super().__init__(num_tasks)
        if not lr > 0 or not decay >= 0:
            raise ConfigurationError(
                f"FAMO's lr is {lr} and its decay {decay}: give above 0, such as 0.025, and at"
                " least 0, such as 0.01"
            )
        self.decay = decay
        self.shifted = ShiftedLosses(num_tasks)
        self.optimizer = WeightOptimizer(num_tasks, lr)
        self.register_buffer("logit_T", torch.zeros(num_tasks))
        self._before_T: Tensor | None = None

    def backward(
        self, loss_T: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Add the gradient of the weighted loss to every parameter's ``.grad``."""
        self._before_T = loss_T.detach().clone()
        self.shifted.observe(self._before_T)
        present_T = self._before_T != 0  # a task that is masked or has no weight takes no part
        share_T = torch.where(
            present_T, self.logit_T.softmax(0) / (self.shifted(self._before_T) + LOWEST_LOSS), 0.0
        )
        share_T = torch.where(present_T.any(), share_T, 1.0)
        weight_T = share_T / share_T.sum()
        (weight_T * loss_T).sum().backward()
        self._statistics = weight_statistics(weight_T * self.num_tasks)

    def after_step(self, losses: Callable[[], Tensor]) -> None:
        """Move weight to the tasks whose losses fell least; not where a loss is not finite."""
        assert self._before_T is not None, "after_step without backward"
        before_T, after_T = self._before_T, losses().detach()
        self._before_T = None
        self.shifted.observe(after_T)
        fall_T = (self.shifted(before_T) + LOWEST_LOSS).log() - (
            self.shifted(after_T) + LOWEST_LOSS
        ).log()
        fall_T = torch.where((before_T != 0) & (after_T != 0), fall_T, 0.0)
        z_T = self.logit_T.softmax(0)
        gradient_T = z_T * (fall_T - z_T @ fall_T) + self.decay * self.logit_T
        self.logit_T.sub_(self.optimizer(gradient_T))
