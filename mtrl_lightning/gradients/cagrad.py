"""Conflict-averse gradient descent (Liu et al. 2021, "Conflict-Averse Gradient Descent for Multi-task Learning").

Shapes: ``T`` trained tasks, ``G`` groups: every task, or the sampled tasks and all others together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.task_gradients import TaskGradients

SMOOTHING = 1e-4
"""Smallest ``||g_w||``, relative to a gradient's root mean square norm.

It leaves the update defined where ``g_w`` is zero: there the dual alone does not say in which
direction to go.
"""


class CAGrad(GradientMethod):
    """Improve the task that improves least, near the mean gradient (algorithm 1).

    The update ``d`` maximises ``min_i g_i . d`` within ``||d - g_0|| <= c ||g_0||``, where ``g_0``
    is the mean gradient. With ``w`` on the simplex minimising ``g_w . g_0 + c ||g_0|| ||g_w||``,
    ``d`` is ``g_0 + c ||g_0|| / ||g_w|| g_w``. It is divided here by ``1 + c``, so that it is the
    mean when the tasks agree; the paper's algorithm does not divide, others divide by ``1 + c^2``.
    It costs one pass a task. Parameters that tasks do not share get the gradient of the mean loss.

    Args:
        num_tasks: number of trained tasks, ``T``.
        c: radius of the ball around the mean gradient, relative to its norm, at least 0; below 1 it
            converges to a minimum of the mean loss, 0 is the mean (``c`` in the paper; 0.5).
        num_sampled: tasks drawn for each update that are told apart, the others being one group
            with their mean gradient (CAGrad-Fast, equation 4; ``|S|`` is 4 on MT10 and 8 on MT50):
            ``num_sampled + 1`` passes; None for all tasks.

    Raises:
        ConfigurationError: if c is negative or no task would be sampled.
    """

    def __init__(self, num_tasks: int, *, c: float = 0.5, num_sampled: int | None = None) -> None:
        super().__init__(num_tasks)
        if not c >= 0:
            raise ConfigurationError(f"CAGrad's c is {c}: give a number of at least 0, such as 0.5")
        if num_sampled is not None and num_sampled < 1:
            raise ConfigurationError(
                f"CAGrad samples {num_sampled} tasks: give at least 1, or null for all"
            )
        self.c = c
        self.num_sampled = num_sampled

    def backward(
        self, loss_T: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set the gradients; sampled tasks are drawn from the generator."""
        member_GT = self._groups(len(loss_T), generator)
        share_G = member_GT.sum(1) / len(loss_T)
        loss_G = (member_GT / member_GT.sum(1, keepdim=True)).to(loss_T) @ loss_T
        gradients = TaskGradients.of(loss_G, parameters, share_G)
        _, self._statistics = gradients.follow(
            lambda gram_GG: self._weights(gram_GG, share_G), share_G
        )

    def _groups(self, num_tasks: int, generator: torch.Generator) -> Tensor:
        """Return which tasks are in which group, ``[G, T]`` of zeros and ones."""
        alone_TT = torch.eye(num_tasks, dtype=torch.float64)
        if self.num_sampled is None or self.num_sampled >= num_tasks:
            return alone_TT
        order_T = torch.randperm(num_tasks, generator=generator)
        sampled, rest = order_T[: self.num_sampled], order_T[self.num_sampled :]
        return torch.cat([alone_TT[sampled], alone_TT[rest].sum(0, keepdim=True)])

    def _weights(self, gram_GG: Tensor, share_G: Tensor) -> Tensor:
        gram, share = gram_GG.numpy(), share_G.numpy()
        radius = self.c * np.sqrt(max(share @ gram @ share, 0.0))
        w = minimise(gram, gram @ share, radius)
        weight = (share + radius / np.sqrt(w @ gram @ w + SMOOTHING**2) * w) / (1 + self.c)
        return torch.from_numpy(weight)


def minimise(gram: npt.NDArray, linear: npt.NDArray, radius: float) -> npt.NDArray:
    """Return the ``w`` on the simplex that minimises ``linear . w + radius ||g_w||``, which is convex."""
    from scipy.optimize import minimize

    def value(w: npt.NDArray) -> tuple[float, npt.NDArray]:
        product = gram @ w
        norm = np.sqrt(w @ product + SMOOTHING**2)
        return float(linear @ w + radius * norm), linear + radius * product / norm

    start = np.full(len(gram), 1 / len(gram))
    on_simplex = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}
    options = {"maxiter": 200, "ftol": 1e-14}
    found = minimize(
        value,
        start,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * len(gram),
        constraints=on_simplex,
        options=options,
    ).x
    w = np.clip(found, 0, None) / np.clip(found, 0, None).sum()
    return w if value(w)[0] <= value(start)[0] else start
