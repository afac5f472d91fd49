"""FairGrad: the update is alpha-fair to the tasks.

Ban and Ji 2024, "Fair Resource Allocation in Multi-Task Learning".

Shapes: ``R`` trained tasks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.checks import at_least
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.task_gradients import (
    TaskGradients,
    average_directions,
    equal_weights,
)
from mtrl_lightning.spec import EnvSpec

RIDGE = 1e-6
"""Added to the squared norm of each unit gradient.

Without it, gradients that cancel out would have no solution, or an unbounded one.
"""
MAX_ITERATIONS = 200
"""Maximum number of Newton steps; 5 to 30 are needed, and more for a large ``alpha``."""
MAX_DECREASE = 2.0
"""Largest decrease of the logarithm of a weight in one step."""
TOLERANCE = 1e-13
"""A step that would decrease the value by less than this fraction of ``a . a`` is the last one.

The value is rounded to about ``1e-15 a . a``. The last step squares the error of the weights.
"""


class FairGrad(GradientMethod):
    """Use ``sum_i w_i g_i`` with ``G w = w^(-1/alpha)``, the alpha-fair update (algorithm 1).

    Within a ball around 0, its direction maximizes the sum of ``u_i^(1 - alpha) / (1 - alpha)``
    over the tasks' improvements ``u_i = g_i . d``, or of ``log u_i`` for an ``alpha`` of 1. ``G``
    is the Gram matrix of the gradients, and all ``w_i`` are positive, so that every task improves.

    The update is scaled as Nash-MTL's: the average of the unit gradients with weights proportional
    to ``w_i ||g_i||``, times the mean norm of the tasks' gradients. Hence it equals the mean
    gradient when the gradients are parallel or ``alpha`` is 0, and Nash-MTL's update when ``alpha``
    is 1. Its length is proportional to the overall scale of the losses. The direction does not
    depend on that scale, but on the tasks' relative scales unless ``alpha`` is 1: a task with a
    small gradient has less weight if ``alpha`` is below 1, and more if it is above 1.

    The paper uses ``sum_i w_i g_i``, without rescaling. So does the authors' code for Meta-World,
    without clipping; it takes 20 steps of gradient descent towards the solution. Its commands for
    MT10 and MT50 set ``alpha`` to 2, while its default is 1; which of them produced the paper's
    MT10 results is unknown. The authors' code for supervised learning solves the equation by least
    squares, multiplies the update by ``R`` and clips its norm to 1.

    A zero gradient is left out. The method costs one backward pass per task. The weights are
    computed on the CPU, which synchronizes with a GPU. Parameters that are not shared get the
    gradient of the mean loss.

    Args:
        spec: the tasks.
        alpha: degree of fairness, at least 0 and finite (``alpha`` in the paper; 2 in the authors'
            MT10 and MT50 commands): 0 for the mean gradient, 1 for proportional fairness. As it
            grows, the update approaches max-min fairness. Near 0 it approaches the mean only if
            the mean improves every task.
    """

    averages_gradients = True

    def __init__(self, spec: EnvSpec, *, alpha: float = 2.0) -> None:
        super().__init__(spec)
        at_least(0, finite=True, alpha=alpha, prefix="FairGrad's ", hint=", such as 2")
        self.alpha = alpha

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every parameter's ``.grad``."""
        gradients = TaskGradients.from_losses(loss_R, parameters)
        _, self._statistics = gradients.combine_with(self._weights, equal_weights(len(loss_R)))

    def _weights(self, gram_RR: Tensor) -> Tensor:
        """Return the weights ``[R]`` of the gradients for a Gram matrix that is not zero."""
        if self.alpha == 0:
            return equal_weights(len(gram_RR))
        return average_directions(
            gram_RR, lambda cosine_RR, norm_R: solve(cosine_RR, norm_R, self.alpha)
        )


def solve(cosine_RR: Tensor, norm_R: Tensor, alpha: float) -> Tensor:
    """Return ``a_i = w_i ||g_i||`` for the positive ``w`` with ``G w = w^(-1/alpha)``.

    With ``C`` the cosines plus the ridge, ``m_i = ||g_i||^((1 - alpha) / (1 + alpha))`` and
    ``a_i = m_i exp(x_i)``, the equation is ``C a = m exp(-x / alpha)``. For orthogonal gradients
    ``x`` is 0. The solution is the minimum of ``a . C a / 2 - sum_i m_i^2 U(x_i)``, strictly convex
    in ``a``, where ``U(x)`` is ``(exp(r x) - 1) / r`` with ``r = 1 - 1 / alpha``, or ``x`` for
    ``r = 0``. Newton's method for ``a`` finds it, with a line search.

    Args:
        cosine_RR: cosines of the gradients.
        norm_R: norms of the gradients, above 0.
        alpha: degree of fairness, above 0.
    """
    cosine = cosine_RR.numpy() + RIDGE * np.eye(len(cosine_RR))
    m = norm_R.numpy() ** ((1 - alpha) / (1 + alpha))
    rate = 1 - 1 / alpha

    def value(x: npt.NDArray) -> float:
        a = m * np.exp(x)
        with np.errstate(over="ignore"):  # an infinite value makes the step shorter
            utility = x if rate == 0 else np.expm1(rate * x) / rate
        return float(a @ cosine @ a / 2 - m**2 @ utility)

    # the best x with equal entries
    x = np.full(len(m), np.log(m @ m / (m @ cosine @ m)) * alpha / (1 + alpha))
    for _ in range(MAX_ITERATIONS):
        a = m * np.exp(x)
        # Newton step for C a = m exp(-x / alpha), as a relative change of a
        target = m * np.exp(-x / alpha)
        residual = cosine @ a - target
        hessian = cosine + np.diag(target / a / alpha)
        relative = -np.linalg.solve(hessian, residual) / a
        decrease = -(a * residual) @ relative
        if decrease <= TOLERANCE * (a @ a):
            return torch.from_numpy(m * np.exp(moved(x, relative)))
        before = value(x)
        # Armijo condition: halve the step until the decrease is sufficient
        while value(moved(x, relative)) > before - 1e-4 * decrease:
            relative /= 2
            decrease /= 2
        x = moved(x, relative)
    return torch.from_numpy(m * np.exp(x))


def moved(x: npt.NDArray, relative: npt.NDArray) -> npt.NDArray:
    """Return ``x`` after a relative change of ``a``.

    An increase is added to ``a``; a decrease is a factor, so that ``a`` stays positive.
    """
    return x + np.where(
        relative > 0, np.log1p(np.maximum(relative, 0)), np.maximum(relative, -MAX_DECREASE)
    )
