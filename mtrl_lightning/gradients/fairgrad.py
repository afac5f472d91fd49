"""FairGrad: the update is alpha-fair to the tasks.

Ban and Ji 2024, "Fair Resource Allocation in Multi-Task Learning".

Shapes: ``R`` trained tasks, ``K`` lengths of a step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.checks import at_least
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.solving import is_readable, lowest, solve_positive, step_lengths
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
"""Newton steps on the host at most; 5 to 30 are needed, and more for a large ``alpha``."""
NUM_STEPS = 20
"""Newton steps on a GPU."""
LARGEST_ALPHA = 10.0
"""``alpha`` up to which ``NUM_STEPS`` are enough."""
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

    The update here is scaled as Nash-MTL's: the average of the unit gradients with weights in
    proportion to ``w_i ||g_i||``, times the mean norm of the tasks' gradients. So it equals the
    mean gradient when the gradients are parallel or ``alpha`` is 0, and Nash-MTL's update when
    ``alpha`` is 1. Its length is in proportion to the scale of all losses. The direction does not
    depend on that scale, but depends on the tasks' scales relative to each other, except when
    ``alpha`` is 1: a task with a small gradient counts less below 1 and more above 1.

    The paper uses ``sum_i w_i g_i`` as it is, which has another length. The authors' program for
    Meta-World does the same and does not clip it. It takes 20 steps of gradient descent towards the
    solution. Its commands for MT10 and MT50 have an ``alpha`` of 2; its default is 1. Which of them
    gave the paper's results on MT10 could not be found out. The authors' program for supervised
    learning solves the equation by least squares, multiplies the update by ``R`` and clips its norm
    to 1.

    A zero gradient is left out. The method costs one backward pass per task. Parameters that are
    not shared get the gradient of the mean loss.

    Args:
        spec: the tasks.
        alpha: degree of fairness, at least 0 and finite (``alpha`` in the paper; 2 in the authors'
            MT10 and MT50 commands): 0 for the mean gradient, 1 for proportional fairness. As it
            grows, the update approaches the one that maximizes the smallest improvement. Near 0 it
            approaches the mean only where the mean improves every task. Above 10 it takes too many
            steps for a GPU, which then waits for the host in every update.
    """

    averages_gradients = True

    def __init__(self, spec: EnvSpec, *, alpha: float = 2.0) -> None:
        super().__init__(spec)
        at_least(0, finite=True, alpha=alpha, prefix="FairGrad's ", hint=", such as 2")
        self.alpha = alpha
        self.solves_on_host = alpha > LARGEST_ALPHA

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every parameter's ``.grad``."""
        gradients = TaskGradients.from_losses(loss_R, parameters)
        _, self._statistics = gradients.combine_with(
            self._weights,
            equal_weights(len(loss_R), loss_R.device),
            on_host=self.solves_on_host,
        )

    def _weights(self, gram_RR: Tensor) -> Tensor:
        """Return the weights ``[R]`` of the gradients for a Gram matrix that is not zero."""
        if self.alpha == 0:
            return equal_weights(len(gram_RR), gram_RR.device)
        solver = solve if is_readable(gram_RR) else solve_by_steps
        return average_directions(
            gram_RR, lambda cosine_RR, norm_R: solver(cosine_RR, norm_R, self.alpha)
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

    # the best of all x with equal entries
    x = np.full(len(m), np.log(m @ m / (m @ cosine @ m)) * alpha / (1 + alpha))
    for _ in range(MAX_ITERATIONS):
        a = m * np.exp(x)
        # Newton's step for C a = m exp(-x / alpha), as a change of a relative to itself
        target = m * np.exp(-x / alpha)
        residual = cosine @ a - target
        hessian = cosine + np.diag(target / a / alpha)
        relative = -np.linalg.solve(hessian, residual) / a
        decrease = -(a * residual) @ relative
        if decrease <= TOLERANCE * (a @ a):
            return torch.from_numpy(m * np.exp(moved(x, relative)))
        before = value(x)
        # Armijo's condition: halve the step until the value falls in proportion
        while value(moved(x, relative)) > before - 1e-4 * decrease:
            relative /= 2
            decrease /= 2
        x = moved(x, relative)
    return torch.from_numpy(m * np.exp(x))


def moved(x: npt.NDArray, relative: npt.NDArray) -> npt.NDArray:
    """Return ``x`` after a change of ``a`` by a fraction of itself.

    An increase is added to ``a``. A decrease is a factor, so that ``a`` stays positive.
    """
    return x + np.where(
        relative > 0, np.log1p(np.maximum(relative, 0)), np.maximum(relative, -MAX_DECREASE)
    )


def solve_by_steps(cosine_RR: Tensor, norm_R: Tensor, alpha: float) -> Tensor:
    """Return the same as ``solve`` by a fixed number of Newton steps, which read no number."""
    cosine_RR = cosine_RR + RIDGE * torch.eye(len(norm_R), dtype=norm_R.dtype, device=norm_R.device)
    m_R = norm_R ** ((1 - alpha) / (1 + alpha))
    rate = 1 - 1 / alpha
    length_K1 = step_lengths(norm_R)
    x_R = (m_R @ m_R / (m_R @ cosine_RR @ m_R)).log() * alpha / (1 + alpha) * torch.ones_like(m_R)
    for _ in range(NUM_STEPS):
        a_R = m_R * x_R.exp()
        target_R = m_R * (-x_R / alpha).exp()
        residual_R = cosine_RR @ a_R - target_R
        hessian_RR = cosine_RR + (target_R / a_R / alpha).diag()
        # scaled to a diagonal of ones
        scale_R = hessian_RR.diagonal().rsqrt()
        scaled_RR = hessian_RR * torch.outer(scale_R, scale_R)
        solution_R = scale_R * solve_positive(scaled_RR, (scale_R * residual_R)[:, None])[:, 0]
        relative_R = -solution_R / a_R
        # of shorter and shorter steps the one with the lowest value
        x_KR = x_R + _moved(length_K1 * relative_R)
        a_KR = m_R * x_KR.exp()
        utility_KR = x_KR if rate == 0 else (rate * x_KR).expm1() / rate
        value_K = (a_KR @ cosine_RR * a_KR).sum(1) / 2 - utility_KR @ m_R.square()
        (best_R,) = lowest(value_K, x_KR)
        # the whole step where the value is too near its minimum to be compared
        decrease = -(a_R * residual_R) @ relative_R
        x_R = torch.where(decrease <= TOLERANCE * (a_R @ a_R), x_KR[0], best_R)
    return m_R * x_R.exp()


def _moved(relative: Tensor) -> Tensor:
    """Return the changes of ``x`` for changes of ``a`` relative to itself, as ``moved`` does."""
    return torch.where(relative > 0, relative.clamp(min=0).log1p(), relative.clamp(-MAX_DECREASE))
