"""GradNorm: task weights that balance the tasks' gradient norms.

Chen et al. 2018, "GradNorm: Gradient Normalization for Adaptive Loss Balancing in Deep Multitask
Networks".

Shapes: ``R`` trained tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl_lightning.checks import above, at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters, one_pass
from mtrl_lightning.gradients.positive import ShiftedLosses, WeightOptimizer
from mtrl_lightning.gradients.task_gradients import TaskGradients, weight_statistics
from mtrl_lightning.spec import EnvSpec

MIN_WEIGHT = 1e-3
"""Smallest weight, before the weights are scaled to the sum ``R``."""
TOLERANCE = 1e-6
"""Relative tolerance within which a norm has reached its target.

Without it, Adam would turn a rounding error into a full step.
"""


class GradNorm(GradientMethod):
    """Weight the losses so that all tasks train at similar rates (algorithm 1).

    The update is the gradient of the mean of ``w_i L_i``. ``G_i = ||grad_W w_i L_i||`` is the
    gradient norm over the last shared layer ``W`` (of all trained networks together). Its target is
    ``mean(G) r_i^a``, held constant, where ``r_i`` is ``L_i / L_i(0)`` divided by its mean over the
    tasks. Only ``w`` is trained on ``sum_i |G_i - target_i|``. Since ``G_i = w_i ||grad_W L_i||``,
    the gradient is ``||grad_W L_i|| sign(G_i - target_i)``: no second derivative is needed.
    Afterwards, ``w`` is normalized to the sum ``R``.

    ``L_i(0)`` is the task's first nonzero loss, since the loss of a masked task is 0. For the
    rates, losses that can be negative are shifted (``ShiftedLosses``), ``L_i`` and ``L_i(0)`` by
    the same amount.

    The weights apply to all parameters, shared or not. The method costs one backward pass, and one
    more per task down to the last shared layer.

    Args:
        spec: the tasks.
        asymmetry: how strongly slower tasks are favoured, at least 0 (``alpha`` in the paper; 1.5).
        lr: Adam's learning rate for the weights, above 0 (0.025 in the paper).
    """

    weight_R: Tensor
    initial_R: Tensor

    def __init__(self, spec: EnvSpec, *, asymmetry: float = 1.5, lr: float = 0.025) -> None:
        super().__init__(spec)
        at_least(0, asymmetry=asymmetry, prefix="GradNorm's ", hint=", such as 1.5")
        above(0, lr=lr, prefix="GradNorm's ", hint=", such as 0.025")
        self.asymmetry = asymmetry
        self.shifted = ShiftedLosses(self.num_trained)
        self.optimizer = WeightOptimizer(self.num_trained, lr)
        self.register_buffer("weight_R", torch.ones(self.num_trained))
        self.register_buffer("initial_R", torch.zeros(self.num_trained))

    def check(self, parameters: TaskParameters) -> None:
        """Check that there is a shared layer on which to balance gradient norms."""
        super().check(parameters)
        if not parameters.last_shared:
            raise ConfigurationError(
                "GradNorm needs a layer shared by all tasks: choose a network that has one"
            )

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every ``.grad`` to the gradient of the weighted mean loss; update the weights."""
        last = TaskParameters(parameters.last_shared, [], [])
        gram_RR = TaskGradients.from_losses(loss_R, last, retain_graph=True).gram()
        # G_i / w_i: unweighted norms; _update_weights multiplies by the weights
        norm_R = gram_RR.diagonal().sqrt().to(loss_R)
        one_pass(loss_R, self.weight_R * (1 / len(loss_R)), parameters)
        self._statistics = weight_statistics(self.weight_R.clone())
        state = list(self.buffers())
        before = [buffer.clone() for buffer in state]
        self._update_weights(loss_R.detach(), norm_R)
        # selected on the device, to avoid GPU synchronization
        is_finite = torch.isfinite(torch.cat([norm_R, loss_R.detach()])).all()
        for buffer, old in zip(state, before, strict=True):
            buffer.copy_(torch.where(is_finite, buffer, old))

    def _update_weights(self, loss_R: Tensor, norm_R: Tensor) -> None:
        # a loss of exactly 0 belongs to a masked task: neither an initial loss nor progress
        is_masked_R = loss_R == 0
        self.initial_R.copy_(
            torch.where((self.initial_R == 0) & ~is_masked_R, loss_R, self.initial_R)
        )
        self.shifted.observe(loss_R)
        # inverse training rates: L_i / L_i(0), relative to their mean below
        ratio_R = (self.shifted(loss_R) + 1e-8) / (self.shifted(self.initial_R) + 1e-8)
        ratio_R = torch.where(is_masked_R | (self.initial_R == 0), 1.0, ratio_R)
        weighted_R = self.weight_R * norm_R
        # target norm of task i: mean(G) r_i^asymmetry
        target_R = weighted_R.mean() * (ratio_R / ratio_R.mean()) ** self.asymmetry
        excess_R = weighted_R - target_R
        # d |G_i - target_i| / d w_i = sign(G_i - target_i) ||g_i||, with a constant target
        sign_R = torch.where(excess_R.abs() > TOLERANCE * target_R, excess_R.sign(), 0.0)
        self.weight_R.sub_(self.optimizer(norm_R * sign_R)).clamp_(min=MIN_WEIGHT)
        # the weights sum to the number of tasks, which preserves the effective learning rate
        self.weight_R.mul_(self.num_trained / self.weight_R.sum())
