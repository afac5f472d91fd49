"""CAGrad: conflict-averse gradient descent.

Liu et al. 2021, "Conflict-Averse Gradient Descent for Multi-task Learning".

Shapes: ``R`` trained tasks, ``G`` groups: every task, or the sampled tasks and all others together,
``K`` lengths of a step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.checks import at_least
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.solving import is_readable, lowest, solve_positive, step_lengths
from mtrl_lightning.gradients.task_gradients import TaskGradients
from mtrl_lightning.spec import EnvSpec

SMOOTHING = 1e-4
"""Smallest ``||g_w||``, relative to the root mean square norm of the gradients.

Where ``g_w`` is zero, the dual problem leaves the direction open. This keeps the update defined.
"""
NUM_STEPS = 18
"""Newton steps on a GPU."""
CENTERING = 0.1
"""Factor by which each step lowers the products of weights and multipliers."""
BOUNDARY = 0.99
"""Largest fraction of the way to 0 that a step goes."""
DAMPING = 1e-7
"""Added to the Gram matrix in a Newton step: rounding of single precision can make its eigenvalues
negative. The solution stays the same."""
FLOOR = 1e-12
"""Lowest product of weight and multiplier that a step aims at."""
CORRIDOR = 1e3
"""Factor by which a multiplier may differ from its target after a step."""


class CAGrad(GradientMethod):
    """Improve the task that improves least, near the mean gradient (algorithm 1).

    The update ``d`` maximizes ``min_i g_i . d`` within ``||d - g_0|| <= c ||g_0||``, where ``g_0``
    is the mean gradient. With ``w`` on the simplex minimizing ``g_w . g_0 + c ||g_0|| ||g_w||``,
    ``d`` is ``g_0 + c ||g_0|| / ||g_w|| g_w``. Here ``d`` is divided by ``1 + c``, so that it
    equals the mean gradient when the tasks agree. The paper's algorithm does not divide; other
    implementations divide by ``1 + c^2``.

    The method costs one backward pass per task. Parameters that are not shared get the gradient of
    the mean loss.

    Args:
        spec: the tasks.
        c: radius of the ball around the mean gradient, relative to its norm, at least 0 (``c`` in
            the paper; 0.5). Below 1 the method converges to a minimum of the mean loss; 0 gives the
            mean gradient.
        num_sampled: number of tasks that are sampled for each update and treated one by one. All
            other tasks form one group with their mean gradient (CAGrad-Fast, equation 4; ``|S|`` is
            4 on MT10 and 8 on MT50), which costs ``num_sampled + 1`` backward passes. None: all
            tasks one by one.
    """

    averages_gradients = True

    def __init__(self, spec: EnvSpec, *, c: float = 0.5, num_sampled: int | None = None) -> None:
        super().__init__(spec)
        at_least(0, c=c, prefix="CAGrad's ", hint=", such as 0.5")
        at_least(1, num_sampled=num_sampled, prefix="CAGrad's ", hint=", or null for all tasks")
        self.c = c
        self.num_sampled = num_sampled

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every parameter's ``.grad``; the generator samples tasks."""
        member_GR = self._groups(loss_R, generator)
        mean_weight_G = member_GR.sum(1) / len(loss_R)
        # the mean loss of each group
        loss_G = (member_GR / member_GR.sum(1, keepdim=True)).to(loss_R) @ loss_R
        gradients = TaskGradients.from_losses(loss_G, parameters, mean_weight_G)

        def weights(gram_GG: Tensor) -> Tensor:
            solve = weights_on_host if is_readable(gram_GG) else weights_by_steps
            return solve(gram_GG, mean_weight_G, self.c)

        _, self._statistics = gradients.combine_with(weights, mean_weight_G)

    def _groups(self, loss_R: Tensor, generator: torch.Generator) -> Tensor:
        """Return which tasks are in which group, ``[G, R]`` of zeros and ones."""
        num_tasks = len(loss_R)
        single_RR = torch.eye(num_tasks, dtype=torch.float64, device=loss_R.device)
        if self.num_sampled is None or self.num_sampled >= num_tasks:
            return single_RR
        order_R = order(num_tasks, generator, loss_R.device)
        sampled = order_R[: self.num_sampled]
        rest = order_R[self.num_sampled :]
        return torch.cat([single_RR[sampled], single_RR[rest].sum(0, keepdim=True)])


def order(num_tasks: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Sample an order of the tasks, ``[R]``."""
    return torch.randperm(num_tasks, generator=generator, device=device)


def weights_on_host(gram_GG: Tensor, mean_weight_G: Tensor, c: float) -> Tensor:
    """Return the weights ``[G]`` in the update, from SciPy's solution of the dual problem."""
    gram = gram_GG.numpy()
    mean_weight = mean_weight_G.numpy()
    # the update stays in a ball of the radius c ||g_0|| around the mean gradient g_0
    radius = c * np.sqrt(max(mean_weight @ gram @ mean_weight, 0.0))
    w = minimize_dual(gram, gram @ mean_weight, radius)
    norm = np.sqrt(max(w @ gram @ w, 0.0) + SMOOTHING**2)
    # g_0 + c ||g_0|| g_w / ||g_w||, divided by 1 + c so that parallel gradients give their mean
    return torch.from_numpy((mean_weight + radius / norm * w) / (1 + c))


def weights_by_steps(gram_GG: Tensor, mean_weight_G: Tensor, c: float) -> Tensor:
    """Return the same as ``weights_on_host`` by a fixed number of steps, which read no number."""
    linear_G = gram_GG @ mean_weight_G
    radius = c * (mean_weight_G @ linear_G).clamp(min=0).sqrt()
    w_G = minimize_dual_by_steps(gram_GG, linear_G, radius)
    return (mean_weight_G + radius / dual_norm(gram_GG, w_G, SMOOTHING**2) * w_G) / (1 + c)


def minimize_dual(gram: npt.NDArray, linear: npt.NDArray, radius: float) -> npt.NDArray:
    """Return the ``w`` on the simplex that minimizes the convex ``linear . w + radius ||g_w||``."""
    from scipy.optimize import minimize

    def value(w: npt.NDArray) -> tuple[float, npt.NDArray]:
        product = gram @ w
        norm = np.sqrt(max(w @ product, 0.0) + SMOOTHING**2)
        return float(linear @ w + radius * norm), linear + radius * product / norm

    start = np.full(len(gram), 1 / len(gram))
    on_simplex = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}
    options = {"maxiter": 200, "ftol": 1e-14}
    minimum = minimize(
        value,
        start,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * len(gram),
        constraints=on_simplex,
        options=options,
    ).x
    w = np.clip(minimum, 0, None) / np.clip(minimum, 0, None).sum()
    # SLSQP may stop at a worse point than it started from
    return w if value(w)[0] <= value(start)[0] else start


def dual_norm(gram_GG: Tensor, w_G: Tensor, smoothing: Tensor | float) -> Tensor:
    """Return ``(||g_w||^2 + smoothing)^(1/2)`` for weights ``[..., G]``."""
    # rounding makes the square of a gradient near zero negative
    return ((w_G @ gram_GG * w_G).sum(-1).clamp(min=0) + smoothing).sqrt()


def minimize_dual_by_steps(gram_GG: Tensor, linear_G: Tensor, radius: Tensor) -> Tensor:
    """Return the same as ``minimize_dual`` by a fixed number of steps, which read no number.

    It is a primal-dual interior-point method. With multipliers ``z`` of ``w >= 0``, each Newton
    step aims at equal products ``w_i z_i``, lower than their mean ``mu`` before. Near ``g_w = 0``
    the norm's second derivative is too large for such steps, so it is smoothed by ``mu``, too.
    """
    w_G = torch.full_like(linear_G, 1 / len(linear_G))
    z_G = torch.ones_like(w_G)
    identity_GG = torch.eye(len(w_G), dtype=w_G.dtype, device=w_G.device)
    damped_GG = gram_GG + DAMPING * identity_GG
    length_K1 = step_lengths(w_G)
    for _ in range(NUM_STEPS):
        mu = (w_G * z_G).mean()
        target = (CENTERING * mu).clamp(min=FLOOR)
        smoothing = mu**2 + SMOOTHING**2
        # gradient and Hessian of linear . w + radius ||g_w||
        norm = dual_norm(gram_GG, w_G, smoothing)
        unit_G = gram_GG @ w_G / norm
        gradient_G = linear_G + radius * unit_G
        hessian_GG = radius / norm * (damped_GG - torch.outer(unit_G, unit_G))
        # (H + diag(z / w)) step = target / w - gradient - nu 1, scaled by (w / z)^(1/2); the
        # multiplier nu keeps the sum of w
        scale_G = (w_G / z_G).sqrt()
        right_G2 = torch.stack([target / w_G - gradient_G, torch.ones_like(w_G)], 1)
        scaled_GG = hessian_GG * torch.outer(scale_G, scale_G) + identity_GG
        solution_G2 = solve_positive(scaled_GG, scale_G[:, None] * right_G2)
        free_G, of_nu_G = (scale_G[:, None] * solution_G2).unbind(1)
        w_step_G = free_G - free_G.sum() / of_nu_G.sum() * of_nu_G
        # where rounding has left the matrix not positive definite
        w_step_G = w_step_G.nan_to_num(0.0, 0.0, 0.0)
        z_step_G = (target - z_G * w_step_G) / w_G - z_G
        # of shorter and shorter steps the one with the lowest value with its barrier
        w_KG = w_G + length_K1 * _longest(w_G, w_step_G) * w_step_G
        z_KG = z_G + length_K1 * _longest(z_G, z_step_G) * z_step_G
        value_K = w_KG @ linear_G + radius * dual_norm(gram_GG, w_KG, smoothing)
        w_G, z_G = lowest(value_K - target * w_KG.log().sum(1), w_KG, z_KG)
        z_G = z_G.clamp(target / w_G / CORRIDOR, target / w_G * CORRIDOR)
    return w_G / w_G.sum()


def _longest(value_G: Tensor, step_G: Tensor) -> Tensor:
    """Return the largest multiple of a step, at most 1, that leaves positive values positive."""
    return BOUNDARY / (-step_G / value_G).max().clamp(min=BOUNDARY)
