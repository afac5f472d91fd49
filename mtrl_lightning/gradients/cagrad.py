"""CAGrad: conflict-averse gradient descent.

Liu et al. 2021, "Conflict-Averse Gradient Descent for Multi-task Learning".

Shapes: ``R`` trained tasks, ``G`` groups: each task, or each sampled task and all others together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.checks import at_least
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.task_gradients import TaskGradients
from mtrl_lightning.spec import EnvSpec

SMOOTHING = 1e-4
"""Smallest ``||g_w||``, relative to the root mean square norm of the gradients.

If ``g_w`` is zero, the dual problem does not determine the direction; the bound keeps it finite.
"""


class CAGrad(GradientMethod):
    """Improve the task that improves least, near the mean gradient (algorithm 1).

    The update ``d`` maximizes ``min_i g_i . d`` within ``||d - g_0|| <= c ||g_0||``, where ``g_0``
    is the mean gradient. With ``w`` on the simplex minimizing ``g_w . g_0 + c ||g_0|| ||g_w||``,
    ``d`` is ``g_0 + c ||g_0|| / ||g_w|| g_w``. Here ``d`` is divided by ``1 + c``, so that it
    equals the mean gradient when the tasks agree. The paper's algorithm does not divide; other
    implementations divide by ``1 + c^2``.

    The method costs one backward pass per task. The weights are computed on the CPU, which
    synchronizes with a GPU. Parameters that are not shared get the gradient of the mean loss.

    Args:
        spec: the tasks.
        c: radius of the ball around the mean gradient, relative to its norm, at least 0 (``c`` in
            the paper; 0.5). Below 1 the method converges to a minimum of the mean loss; 0 gives the
            mean gradient.
        num_sampled: number of tasks that are sampled for each update and treated individually. All
            other tasks form one group with their mean gradient (CAGrad-Fast, equation 4; ``|S|`` is
            4 on MT10 and 8 on MT50), which costs ``num_sampled + 1`` backward passes. None to treat
            all tasks individually.
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
        _, self._statistics = gradients.combine_with(
            lambda gram_GG: weights_from_dual(gram_GG, mean_weight_G, self.c), mean_weight_G
        )

    def _groups(self, loss_R: Tensor, generator: torch.Generator) -> Tensor:
        """Return the groups' membership matrix, ``[G, R]`` of zeros and ones on the CPU."""
        num_tasks = len(loss_R)
        single_RR = torch.eye(num_tasks, dtype=torch.float64)
        if self.num_sampled is None or self.num_sampled >= num_tasks:
            return single_RR
        order_R = order(num_tasks, generator, loss_R.device).cpu()
        sampled = order_R[: self.num_sampled]
        rest = order_R[self.num_sampled :]
        return torch.cat([single_RR[sampled], single_RR[rest].sum(0, keepdim=True)])


def order(num_tasks: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Sample an order of the tasks, ``[R]``."""
    return torch.randperm(num_tasks, generator=generator, device=device)


def weights_from_dual(gram_GG: Tensor, mean_weight_G: Tensor, c: float) -> Tensor:
    """Return the weights ``[G]`` in the update, from SciPy's solution of the dual problem."""
    gram = gram_GG.numpy()
    mean_weight = mean_weight_G.numpy()
    # the update stays in a ball of radius c ||g_0|| around the mean gradient g_0
    radius = c * np.sqrt(max(mean_weight @ gram @ mean_weight, 0.0))
    w = minimize_dual(gram, gram @ mean_weight, radius)
    norm = np.sqrt(max(w @ gram @ w, 0.0) + SMOOTHING**2)
    # g_0 + c ||g_0|| g_w / ||g_w||, divided by 1 + c so that parallel gradients give their mean
    return torch.from_numpy((mean_weight + radius / norm * w) / (1 + c))


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
    # SLSQP may stop at a point worse than its start
    return w if value(w)[0] <= value(start)[0] else start
