"""Parts of the solvers that compute weights where the tasks' gradients are: on a GPU, or a CPU.

A GPU's solvers read no number and make a fixed number of steps, so that a CUDA graph can record
them. PyTorch's factorizations cannot be recorded: their library is not made for it, and ``eigh``
waits for the GPU to check its result.

Shapes: ``N`` unknowns, ``M`` right-hand sides, ``K`` lengths of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_LENGTHS = 20
"""Lengths of a step that are tried: 1, 1/2, 1/4, ..."""


def is_readable(x: Tensor) -> bool:
    """Return whether the numbers of a tensor are read without waiting for a device."""
    return x.device.type == "cpu"


def solve_positive(matrix_NN: Tensor, right_NM: Tensor) -> Tensor:
    """Return the solution ``[N, M]`` of ``matrix x = right``, by Gauss-Jordan elimination.

    Args:
        matrix_NN: positive definite, so that no pivots are searched for.
        right_NM: right-hand sides.
    """
    size = len(matrix_NN)
    unit_NN = torch.eye(size, dtype=matrix_NN.dtype, device=matrix_NN.device)
    rows = torch.cat([matrix_NN, right_NM], 1)
    for i in range(size):
        # take multiples of row i from the others, and divide it by its pivot
        rows = torch.addr(rows, rows[:, i] - unit_NN[i], rows[i] / rows[i, i], alpha=-1)
    return rows[:, size:]


def step_lengths(x: Tensor) -> Tensor:
    """Return the lengths of a step that are tried, ``[K, 1]``."""
    return 2.0 ** -torch.arange(NUM_LENGTHS, dtype=x.dtype, device=x.device)[:, None]


def lowest(value_K: Tensor, *rows: Tensor) -> list[Tensor]:
    """Return of every ``[K, ...]`` the row with the lowest value; NaN counts as infinite."""
    best = value_K.nan_to_num(nan=torch.inf).argmin(0, keepdim=True)
    # an index of no dimension would be read
    return [row.index_select(0, best)[0] for row in rows]
