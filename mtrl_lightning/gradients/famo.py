"""FAMO: task weights that decrease all losses at the same rate.

Liu et al. 2023, "FAMO: Fast Adaptive Multitask Optimization".

Shapes: ``R`` trained tasks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mtrl_lightning.checks import above, at_least
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters, one_pass
from mtrl_lightning.gradients.positive import ShiftedLosses, WeightOptimizer
from mtrl_lightning.gradients.task_gradients import weight_statistics
from mtrl_lightning.spec import EnvSpec

EPSILON = 1e-8
"""Added to every loss before dividing by it (the paper's value)."""


class FAMO(GradientMethod):
    """Use the gradient of ``c sum_i z_i log D_i`` with weights ``z = softmax(xi)`` (algorithm 1).

    ``D_i`` is the loss, shifted if it can be negative (``ShiftedLosses``). The factor
    ``c = 1 / sum_i (z_i / D_i)`` is held constant. Task ``i`` has the weight ``c z_i / D_i``, and
    the weights sum to 1, as those of the mean do. After the optimizer step, ``xi`` descends along
    ``J' delta + decay xi``, where ``J`` is the Jacobian of the softmax and ``delta_i`` the decrease
    of ``log D_i`` on the same batch. This increases the weight of tasks that improved least.

    The update does not depend on the scale of the losses. A task weighting therefore has no effect,
    except that a weight of 0 leaves the task out.

    The weights apply to all parameters, shared or not. The method costs one backward pass and a
    second evaluation of the losses.

    Args:
        spec: the tasks.
        lr: Adam's learning rate for ``xi``, above 0 (``beta`` in the paper; 0.025).
        decay: weight decay of ``xi``, at least 0 (``gamma`` in the paper; 0.001 or 0.01, and 0.01
            in its MT10 command).
    """

    is_one_pass = True
    logit_R: Tensor

    def __init__(self, spec: EnvSpec, *, lr: float = 0.025, decay: float = 0.01) -> None:
        super().__init__(spec)
        above(0, lr=lr, prefix="FAMO's ", hint=", such as 0.025")
        at_least(0, decay=decay, prefix="FAMO's ", hint=", such as 0.01")
        self.decay = decay
        self.shifted = ShiftedLosses(self.num_trained)
        self.optimizer = WeightOptimizer(self.num_trained, lr)
        self.register_buffer("logit_R", torch.zeros(self.num_trained))
        self._loss_before_R: Tensor | None = None

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every parameter's ``.grad`` to the gradient of the weighted loss."""
        before_R = loss_R.detach().clone()
        self._loss_before_R = before_R
        self.shifted.observe(before_R)
        is_present_R = before_R != 0  # a task that is masked or has no weight is left out
        z_R = self.logit_R.softmax(0)
        # the gradient of sum_i z_i log l_i has the weights z_i / l_i
        share_R = torch.where(is_present_R, z_R / (self.shifted(before_R) + EPSILON), 0.0)
        share_R = torch.where(is_present_R.any(), share_R, 1.0)
        weight_R = share_R / share_R.sum()
        one_pass(loss_R, weight_R, parameters)
        self._statistics = weight_statistics(weight_R * self.num_trained)

    def after_step(self, losses: Callable[[], Tensor]) -> None:
        """Increase the weights of tasks that improved least, unless a loss is not finite."""
        assert self._loss_before_R is not None, "after_step without backward"
        before_R = self._loss_before_R
        self._loss_before_R = None
        after_R = losses().detach()
        self.shifted.observe(after_R)
        log_before_R = (self.shifted(before_R) + EPSILON).log()
        log_after_R = (self.shifted(after_R) + EPSILON).log()
        # log l_i(t) - log l_i(t + 1): decrease of each log loss
        fall_R = torch.where((before_R != 0) & (after_R != 0), log_before_R - log_after_R, 0.0)
        z_R = self.logit_R.softmax(0)
        # J' fall with the Jacobian J = diag(z) - z z' of the softmax, and weight decay
        gradient_R = z_R * (fall_R - z_R @ fall_R) + self.decay * self.logit_R
        self.logit_R.sub_(self.optimizer(gradient_R))
