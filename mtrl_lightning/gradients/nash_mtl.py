"""Nash-MTL: the update is a Nash bargaining solution between the tasks.

Navon et al. 2022, "Multi-Task Learning as a Bargaining Game".

Shapes: ``R`` trained tasks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mtrl_lightning.checks import above, at_least
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.task_gradients import (
    TaskGradients,
    average_directions,
    equal_weights,
    weight_statistics,
    weighted_backward,
)
from mtrl_lightning.spec import EnvSpec

RIDGE = 1e-6
"""Added to the squared norm of each unit gradient.

Without it, gradients that cancel out would have no solution, or an unbounded one.
"""


class NashMTL(GradientMethod):
    """Use ``sum_i a_i g_i`` with ``G a = 1 / a``, the Nash bargaining solution (algorithm 1).

    The solution is the minimum of the strictly convex ``a . G a / 2 - sum_i log a_i``, computed
    with a trust-region method, while the paper solves a sequence of convex programs. It depends
    only on the directions of the gradients: ``a_i ||g_i||`` solves the same equation for unit
    gradients.

    The update is the average of the unit gradients with weights proportional to ``a_i ||g_i||``,
    times the mean norm of the tasks' gradients. Hence it equals the mean gradient when the
    gradients are parallel. It has the direction of the paper's update, but a different length: the
    paper's update has norm ``sqrt(R)``, and the authors' code clips it to 1, so that its norm is
    always 1. ``max_norm=1.0`` gives the same update if its norm is at least 1 before clipping. A
    shorter update keeps its length: for two orthogonal gradients of norm 0.1, both components are
    0.05, compared with 0.707 in the authors' code.

    A zero gradient is left out. The method costs one backward pass per task, or two in total for
    updates that reuse the weights. The weights are computed on the CPU, which synchronizes with a
    GPU. Parameters that are not shared get the gradient of the mean loss.

    The direction of the update does not depend on the scale of the losses. A task weighting
    therefore changes only its length, through the mean norm. A weight of 0 leaves the task out.

    Args:
        spec: the tasks.
        max_norm: norm to which the gradient of the shared parameters is clipped, above 0 (1.0 in
            the authors' code); None for no clipping.
        update_every: number of updates that use the same weights (1, 50 and 100 in the paper's MT10
            experiments).
    """

    averages_gradients = True
    weight_R: Tensor
    updates_since_solved: Tensor

    def __init__(
        self, spec: EnvSpec, *, max_norm: float | None = None, update_every: int = 1
    ) -> None:
        super().__init__(spec)
        above(0, max_norm=max_norm, prefix="Nash-MTL's ", hint=", or null for no clipping")
        at_least(1, update_every=update_every, prefix="Nash-MTL's ")
        self.max_norm = max_norm
        self.update_every = update_every
        self.register_buffer("weight_R", equal_weights(self.num_trained))
        self.register_buffer("updates_since_solved", torch.tensor(0))

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every parameter's ``.grad``, with new or reused weights."""
        # solving takes one backward pass per task, reusing weights at most two
        if self.updates_since_solved == 0:
            gradients = TaskGradients.from_losses(loss_R, parameters)
            weight_R, self._statistics = gradients.combine_with(bargain, equal_weights(len(loss_R)))
            self.weight_R.copy_(weight_R)
        else:
            weighted_backward(loss_R, self.weight_R, parameters)
            self._statistics = weight_statistics(self.weight_R * self.num_trained)
        self.updates_since_solved.add_(1).remainder_(self.update_every)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters.shared, self.max_norm)


def bargain(gram_RR: Tensor) -> Tensor:
    """Return the weights ``[R]`` of the gradients for a Gram matrix that is not zero."""
    return average_directions(gram_RR, lambda cosine_RR, norm_R: solve(cosine_RR))


def solve(cosine_RR: Tensor) -> Tensor:
    """Return the positive ``a`` with ``(G + ridge) a = 1 / a``.

    It is the minimum of the convex ``a . (G + ridge) a / 2 - sum_i log a_i``.
    """
    from scipy.optimize import minimize

    gram = cosine_RR.numpy() + RIDGE * np.eye(len(cosine_RR))

    def value(a: npt.NDArray) -> float:
        return float(a @ gram @ a / 2 - np.log(a).sum()) if (a > 0).all() else np.inf

    # the best vector with equal entries
    start = np.full(len(gram), np.sqrt(len(gram) / max(gram.sum(), RIDGE)))
    solution = minimize(
        value,
        start,
        jac=lambda a: gram @ a - 1 / a,
        hess=lambda a: gram + np.diag(a**-2),
        method="trust-exact",
        options={
            "gtol": 1e-9,
            "maxiter": 500,
            "initial_trust_radius": start[0] / 2,
            "max_trust_radius": 1e6,
        },
    )
    return torch.from_numpy(solution.x)
