"""Aligned-MTL: give all principal components of the tasks' gradients the same length.

Senushkin et al. 2023, "Independent Component Alignment for Multi-Task Learning".

Shapes: ``R`` trained tasks, ``P`` principal components.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.task_gradients import TaskGradients, equal_weights

TOLERANCE = torch.finfo(torch.float32).eps
"""Eigenvalues up to ``R`` times this fraction of the largest one count as zero.

The Gram matrix is computed in float32: smaller eigenvalues are rounding errors.
"""


class AlignedMTL(GradientMethod):
    """Average the gradients after equalizing their principal components (algorithm 1).

    The Gram matrix ``V diag(l) V'`` has the squared singular values ``l`` of the gradients. With
    ``B = sqrt(min l) V diag(l)^(-1/2) V'`` over the eigenvalues that are not zero, the tasks'
    weights are ``B (1/R, ..., 1/R)``. All singular values become the smallest one, as in the paper.
    The update equals the mean gradient when all gradients are parallel, and is short when they are
    nearly parallel.

    The method costs one backward pass per task. The weights are computed on the CPU, which
    synchronizes with a GPU. Parameters that are not shared get the gradient of the mean loss.

    Args:
        spec: the tasks.
    """

    averages_gradients = True

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every parameter's ``.grad``."""
        mean_weight_R = equal_weights(len(loss_R))
        gradients = TaskGradients.from_losses(loss_R, parameters)
        _, self._statistics = gradients.combine_with(
            lambda gram_RR: alignment(gram_RR) @ mean_weight_R, mean_weight_R
        )


def alignment(gram_RR: Tensor) -> Tensor:
    """Return ``B`` (``[R, R]``) for a Gram matrix that is not zero."""
    value_R, vector_RR = torch.linalg.eigh(gram_RR)
    # eigenvalues beyond the rank of the gradients are rounding errors
    is_nonzero_R = value_R > len(gram_RR) * TOLERANCE * value_R.max()
    value_P = value_R[is_nonzero_R]
    vector_RP = vector_RR[:, is_nonzero_R]
    # B = sqrt(min l) V diag(l)^(-1/2) V'
    return (vector_RP * (value_P.min() / value_P).sqrt()) @ vector_RP.t()
