"""Align the principal components (Senushkin et al. 2023, "Independent Component Alignment for Multi-Task Learning").

Shapes: ``T`` trained tasks, ``R`` principal components.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.task_gradients import TaskGradients, equal_shares

TOLERANCE = torch.finfo(torch.float32).eps
"""Eigenvalues up to ``T`` times this share of the largest count as zero: the products are summed in float32."""


class AlignedMTL(GradientMethod):
    """Follow the mean of the gradients after giving all their principal components the same length (algorithm 1).

    The Gram matrix ``V diag(l) V'`` has the gradients' squared singular values ``l``. With ``B``
    being ``sqrt(min l) V diag(l)^(-1/2) V'`` over the eigenvalues that are not zero, the weights
    are ``B (1/T, ..., 1/T)``: all singular values become the smallest one, which is the paper's
    scale. It is the mean when the tasks agree, and small when they agree but for a little. It costs
    one pass a task. Parameters that tasks do not share get the gradient of the mean loss.

    Args:
        num_tasks: number of trained tasks, ``T``.
    """

    def backward(
        self, loss_T: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set the gradients."""
        share_T = equal_shares(len(loss_T))
        gradients = TaskGradients.of(loss_T, parameters)
        _, self._statistics = gradients.follow(
            lambda gram_TT: alignment(gram_TT) @ share_T, share_T
        )


def alignment(gram_TT: Tensor) -> Tensor:
    """Return ``B``, for a Gram matrix that is not zero."""
    value_T, vector_TT = torch.linalg.eigh(gram_TT)
    kept = value_T > len(gram_TT) * TOLERANCE * value_T.max()
    value_R, vector_TR = value_T[kept], vector_TT[:, kept]
    return (vector_TR * (value_R.min() / value_R).sqrt()) @ vector_TR.t()
