"""A graph for each task's rows, so that the gradient of one task's loss costs its own rows only.

Shapes: ``R`` trained tasks, ``B = R * n`` batch (task-major).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtrl_lightning.gradients import GradientMethod


def task_by_task(
    method: GradientMethod, function: Callable[..., Tensor], dim: int, *rows: Tensor
) -> Tensor:
    """Return ``function(*rows)``, on a CPU for each task's rows apart if the method needs it.

    It does if it differentiates the tasks' losses one by one.
    ``R`` backward passes, one for each task's loss, then cost about as much as one: a pass does not
    enter the other tasks' graphs. That pays on a CPU, where a small product costs little; a GPU
    takes all passes in one.

    Args:
        method: what differentiates the tasks' losses.
        function: maps rows ``[B, ...]`` to something that has the rows in the dimension ``dim``.
        dim: where the rows are in what comes out.
        rows: tensors ``[B, ...]``, task-major.
    """
    if method.is_one_pass:
        return function(*rows)
    return apart(method.num_trained, function, dim, *rows)


def apart(num_tasks: int, function: Callable[..., Tensor], dim: int, *rows: Tensor) -> Tensor:
    """Return ``function(*rows)``, on a CPU computed for each task's rows apart.

    Elsewhere ``TaskGradients`` takes all tasks in one batched pass, which cannot ask which rows of
    a gradient are zero.

    Args:
        num_tasks: number of trained tasks, ``R``.
        function: maps rows ``[B, ...]`` to something that has the rows in the dimension ``dim``.
        dim: where the rows are in what comes out.
        rows: tensors ``[B, ...]``, task-major.
    """
    if rows[0].device.type != "cpu":
        return function(*rows)
    parts = zip(*(x.chunk(num_tasks) for x in rows), strict=True)
    joined: Tensor = _Join.apply(dim, *(function(*part) for part in parts))
    return joined


class _Join(torch.autograd.Function):
    """Concatenate; backwards, leave out the parts whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim = dim
        ctx.sizes = [part.shape[dim] for part in parts]
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradients[0].split(ctx.sizes, ctx.dim)
        return None, *(part if bool(part.any()) else None for part in parts)
