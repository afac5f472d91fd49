"""Means and variances of unions of rows."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

Weight: TypeAlias = "Tensor | float"


def union(
    mean: Tensor, variance: Tensor, added_mean: Tensor, added_variance: Tensor, weight: Weight
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of a union of rows (Chan et al. 1979).

    The variance of a union is the weighted mean of the variances plus the variance of the means.

    Args:
        mean: mean of the existing rows.
        variance: variance of the existing rows, without Bessel's correction.
        added_mean: mean of the added rows.
        added_variance: variance of the added rows.
        weight: fraction of added rows in the union, from 0 to 1.
    """
    shift = added_mean - mean
    within = weight * (added_variance - variance)
    between = weight * (1 - weight) * shift.square()
    return mean + weight * shift, variance + (within + between)
