"""Aligned-MTL: give all principal components of the tasks' gradients the same length.

Senushkin et al. 2023, "Independent Component Alignment for Multi-Task Learning".

Shapes: ``R`` trained tasks, ``P`` principal components.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl_lightning.gradients.method import GradientMethod, TaskParameters
from mtrl_lightning.gradients.solving import is_readable
from mtrl_lightning.gradients.task_gradients import TaskGradients, equal_weights

TOLERANCE = torch.finfo(torch.float32).eps
"""Eigenvalues up to ``R`` times this fraction of the largest one count as zero.

The Gram matrix is computed in float32: smaller eigenvalues are rounding errors.
"""
NUM_SQUARES = 30
"""Squarings after which only the largest eigenvalue is left of a matrix."""
NUM_SIGN_STEPS = 50
"""Newton-Schulz steps for the signs: 44 for a distance of 1e-7 from 0."""
NUM_ROOT_STEPS = 30
"""Newton-Schulz steps for the roots: 24 for eigenvalues down to 1e-7."""


class AlignedMTL(GradientMethod):
    """Average the gradients after equalizing their principal components (algorithm 1).

    The Gram matrix ``V diag(l) V'`` has the squared singular values ``l`` of the gradients. With
    ``B = sqrt(min l) V diag(l)^(-1/2) V'`` over the eigenvalues that are not zero, the tasks'
    weights are ``B (1/R, ..., 1/R)``. All singular values become the smallest one, which is the
    scale of the paper. The update equals the mean gradient when all gradients are parallel. It
    is short when they are nearly parallel.

    The method costs one backward pass per task. Parameters that are not shared get the gradient of
    the mean loss.

    Args:
        spec: the tasks.
    """

    averages_gradients = True

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every parameter's ``.grad``."""
        mean_weight_R = equal_weights(len(loss_R), loss_R.device)
        gradients = TaskGradients.from_losses(loss_R, parameters)
        align = alignment if is_readable(loss_R) else alignment_by_products
        _, self._statistics = gradients.combine_with(
            lambda gram_RR: align(gram_RR) @ mean_weight_R, mean_weight_R
        )


def alignment(gram_RR: Tensor) -> Tensor:
    """Return ``B`` (``[R, R]``) for a Gram matrix that is not zero."""
    value_R, vector_RR = torch.linalg.eigh(gram_RR)
    # the rank of the gradients: other eigenvalues are rounding errors
    is_nonzero_R = value_R > len(gram_RR) * TOLERANCE * value_R.max()
    value_P = value_R[is_nonzero_R]
    vector_RP = vector_RR[:, is_nonzero_R]
    # B = sqrt(min l) V diag(l)^(-1/2) V'
    return (vector_RP * (value_P.min() / value_P).sqrt()) @ vector_RP.t()


def alignment_by_products(gram_RR: Tensor) -> Tensor:
    """Return the same as ``alignment`` without eigenvectors: a GPU makes matrix products only.

    With ``P`` the projection on the components that are no rounding errors, and ``H`` equal to
    ``G^(-1/2)`` on these and 0 elsewhere, ``B`` is ``H`` divided by its largest eigenvalue.
    """
    identity_RR = torch.eye(len(gram_RR), dtype=gram_RR.dtype, device=gram_RR.device)
    largest = largest_eigenvalue(gram_RR)
    scaled_RR = gram_RR / largest
    # P = (1 + sign(G - tolerance)) / 2
    above_RR = scaled_RR - len(gram_RR) * TOLERANCE * identity_RR
    projection_RR = (identity_RR + matrix_sign(above_RR)) / 2
    # other eigenvalues become 1 in place of 0, so that there is a root
    regular_RR = scaled_RR @ projection_RR + identity_RR - projection_RR
    root_RR = projection_RR @ inverse_root((regular_RR + regular_RR.t()) / 2)
    return root_RR / largest_eigenvalue(root_RR)


def largest_eigenvalue(matrix_RR: Tensor) -> Tensor:
    """Return the largest eigenvalue of a positive semidefinite matrix that is not zero."""
    power_RR = matrix_RR
    for _ in range(NUM_SQUARES):
        power_RR = power_RR @ power_RR
        power_RR = power_RR / power_RR.trace()
    # the mean over the eigenvectors that are left
    return (power_RR * matrix_RR).sum()


def matrix_sign(matrix_RR: Tensor) -> Tensor:
    """Return ``V sign(l) V'`` of a symmetric ``V diag(l) V'`` with ``l`` from -1 to 1."""
    sign_RR = matrix_RR
    for _ in range(NUM_SIGN_STEPS):
        # s <- s (3 - s^2) / 2
        sign_RR = torch.addmm(sign_RR, sign_RR, sign_RR @ sign_RR, beta=1.5, alpha=-0.5)
    return sign_RR


def inverse_root(matrix_RR: Tensor) -> Tensor:
    """Return ``V l^(-1/2) V'`` of a symmetric ``V diag(l) V'`` with ``l`` above 0, up to 1."""
    identity_RR = torch.eye(len(matrix_RR), dtype=matrix_RR.dtype, device=matrix_RR.device)
    root_RR = matrix_RR
    inverse_RR = identity_RR
    for _ in range(NUM_ROOT_STEPS):
        # t = (3 - z y) / 2; y <- y t, which becomes the root; z <- t z, its inverse
        step_RR = torch.addmm(identity_RR, inverse_RR, root_RR, beta=1.5, alpha=-0.5)
        root_RR = root_RR @ step_RR
        inverse_RR = step_RR @ inverse_RR
    return inverse_RR
