"""Weights that balance the tasks' gradient norms (Chen et al. 2018, "GradNorm").

Shapes: ``T`` trained tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.positive import ShiftedLosses, WeightOptimizer
from mtrl_lightning.gradients.task_gradients import TaskGradients, weight_statistics

LOWEST_WEIGHT = 1e-3
"""Weights stay above this before they are scaled to the sum ``T``."""
EQUAL = 1e-6
"""A norm this close to its target, relative to it, is on target: Adam would make a step of a rounding error."""


class GradNorm(GradientMethod):
    """Follow the mean of ``w_i L_i``, with weights that let all tasks train at similar rates (algorithm 1).

    ``G_i = ||grad_W w_i L_i||`` over the last shared layer ``W`` (of every network that is trained,
    taken together) is drawn to ``mean(G) r_i^a``, held constant, where ``r_i`` is ``L_i / L_i(0)``
    divided by its mean over the tasks. Only ``w`` learns from ``sum_i |G_i - target_i|``; as
    ``G_i`` is ``w_i ||grad_W L_i||``, its gradient is ``||grad_W L_i|| sign(G_i - target_i)``, and
    no second derivative is needed. Then ``w`` is scaled to the sum ``T``. ``L_i(0)`` is the task's
    first loss that is not 0, as a masked task's is. For the rates, losses that can be negative are
    shifted (``ShiftedLosses``), ``L_i`` and ``L_i(0)`` by the same.

    The loss of a task is weighted for all parameters, also for those that tasks do not share. It
    costs one pass, and one down to the last shared layer for each task.

    Args:
        num_tasks: number of trained tasks, ``T``.
        asymmetry: how much more a slower task gets, at least 0 (``alpha`` in the paper; 1.5).
        lr: learning rate of the weights, with Adam (0.025 in the paper).

    Raises:
        ConfigurationError: if asymmetry is negative or lr not above 0.
    """

    weight_T: Tensor
    initial_T: Tensor

    def __init__(self, num_tasks: int, *, asymmetry: float = 1.5, lr: float = 0.025) -> None:
        super().__init__(num_tasks)
        if not asymmetry >= 0 or not lr > 0:
            raise ConfigurationError(
                f"GradNorm's asymmetry is {asymmetry} and its lr {lr}: give at least 0, such as"
                " 1.5, and above 0, "
                "such as 0.025"
            )
        self.asymmetry = asymmetry
        self.shifted = ShiftedLosses(num_tasks)
        self.optimizer = WeightOptimizer(num_tasks, lr)
        self.register_buffer("weight_T", torch.ones(num_tasks))
        self.register_buffer("initial_T", torch.zeros(num_tasks))

    def check(self, parameters: TaskParameters) -> None:
        """Check that there is a shared layer, whose gradients are measured.

        Raises:
            ConfigurationError: if there is none.
        """
        super().check(parameters)
        if not parameters.last_shared:
            raise ConfigurationError(
                "GradNorm needs a layer that all tasks share: choose a network that has one"
            )

    def backward(
        self, loss_T: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Add the gradient of the weighted mean loss to every parameter's ``.grad``; then learn the weights."""
        last = TaskParameters(parameters.last_shared, [], [], parameters.reduce)
        norm_T = (
            TaskGradients.of(loss_T, last, retain_graph=True).gram().diagonal().sqrt().to(loss_T)
        )
        (self.weight_T * loss_T).mean().backward()
        self._statistics = weight_statistics(self.weight_T.clone())
        if torch.isfinite(norm_T).all() and torch.isfinite(loss_T).all():
            self._learn(loss_T.detach(), norm_T)

    def _learn(self, loss_T: Tensor, norm_T: Tensor) -> None:
        # a loss of exactly 0 is of a task that is masked: it neither begins nor says anything of
        # its progress
        is_masked_T = loss_T == 0
        self.initial_T.copy_(
            torch.where((self.initial_T == 0) & ~is_masked_T, loss_T, self.initial_T)
        )
        self.shifted.observe(loss_T)
        ratio_T = (self.shifted(loss_T) + 1e-8) / (self.shifted(self.initial_T) + 1e-8)
        ratio_T = torch.where(is_masked_T | (self.initial_T == 0), 1.0, ratio_T)
        weighted_T = self.weight_T * norm_T
        target_T = weighted_T.mean() * (ratio_T / ratio_T.mean()) ** self.asymmetry
        excess_T = weighted_T - target_T
        sign_T = torch.where(excess_T.abs() > EQUAL * target_T, excess_T.sign(), 0.0)
        self.weight_T.sub_(self.optimizer(norm_T * sign_T)).clamp_(min=LOWEST_WEIGHT)
        self.weight_T.mul_(self.num_tasks / self.weight_T.sum())
