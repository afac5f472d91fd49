"""A bargain between the tasks (Navon et al. 2022, "Multi-Task Learning as a Bargaining Game").

Shapes: ``T`` trained tasks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.task_gradients import (
    TaskGradients,
    equal_shares,
    weight_statistics,
    weighted_backward,
)

RIDGE = 1e-6
"""Added to the squared norm of each unit gradient: opposite or zero gradients leave no bargain, or an unbounded one."""


class NashMTL(GradientMethod):
    """Follow ``sum_i a_i g_i`` with ``G a = 1 / a``, the Nash bargaining solution (algorithm 1).

    The solution is the minimum of the strictly convex ``a . G a / 2 - sum_i log a_i``, found here
    by a trust-region method, where the paper solves a sequence of convex programs. It depends on
    the gradients' directions only: ``a_i ||g_i||`` solves the same equation for unit gradients.
    These are averaged with the weights ``a_i ||g_i||`` and multiplied by the tasks' mean norm, so
    that the update is the mean when the tasks' gradients are parallel. The paper's own update has
    norm ``sqrt(T)``, and its code clips it to 1, which is ``max_norm=1.0`` here. A zero gradient
    takes no part. It costs one pass a task, two where the weights are those of before. Parameters
    that tasks do not share get the gradient of the mean loss.

    The directions do not depend on the losses' scale, so that a task's weighting is without effect.

    Args:
        num_tasks: number of trained tasks, ``T``.
        max_norm: norm above which the gradient of the shared parameters is scaled down, above 0
            (1.0 in the paper's code); None for no limit.
        update_every: updates for which the weights are kept (1, 50 and 100 in the paper's MT10).

    Raises:
        ConfigurationError: if max_norm is not positive or update_every below 1.
    """

    weight_T: Tensor
    since: Tensor

    def __init__(
        self, num_tasks: int, *, max_norm: float | None = None, update_every: int = 1
    ) -> None:
        super().__init__(num_tasks)
        if max_norm is not None and not max_norm > 0:
            raise ConfigurationError(
                f"Nash-MTL's max_norm is {max_norm}: give a number above 0, or null for no limit"
            )
        if update_every < 1:
            raise ConfigurationError(f"Nash-MTL's update_every is {update_every}: give at least 1")
        self.max_norm = max_norm
        self.update_every = update_every
        self.register_buffer(
            "weight_T", torch.full((num_tasks,), 1 / num_tasks, dtype=torch.float64)
        )
        self.register_buffer("since", torch.tensor(0))

    def backward(
        self, loss_T: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set the gradients, with new weights or those of before."""
        if self.since == 0:
            gradients = TaskGradients.of(loss_T, parameters)
            weight_T, self._statistics = gradients.follow(bargain, equal_shares(len(loss_T)))
            self.weight_T.copy_(weight_T)
        else:
            weighted_backward(loss_T, self.weight_T, parameters)
            self._statistics = weight_statistics(self.weight_T * self.num_tasks)
        self.since.add_(1).remainder_(self.update_every)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(parameters.shared, self.max_norm)


def bargain(gram_TT: Tensor) -> Tensor:
    """Return the scaled weights for a Gram matrix that is not zero."""
    norm_T = gram_TT.diagonal().sqrt()
    present = norm_T > 0
    norm_P = norm_T[present]
    unit_P = solve(gram_TT[present][:, present] / torch.outer(norm_P, norm_P))
    weight_T = torch.zeros_like(norm_T)
    weight_T[present] = unit_P / unit_P.sum() * norm_T.mean() / norm_P
    return weight_T


def solve(gram_TT: Tensor) -> Tensor:
    """Return the ``a`` above 0 with ``(G + ridge) a = 1 / a``, the end of the convex ``a'Ga / 2 - sum log a``."""
    from scipy.optimize import minimize

    gram = gram_TT.numpy() + RIDGE * np.eye(len(gram_TT))

    def value(a: npt.NDArray) -> float:
        return float(a @ gram @ a / 2 - np.log(a).sum()) if (a > 0).all() else np.inf

    # the best of the vectors whose entries are equal
    start = np.full(len(gram), np.sqrt(len(gram) / max(gram.sum(), RIDGE)))
    found = minimize(
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
    return torch.from_numpy(found.x)
