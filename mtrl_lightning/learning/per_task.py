"""A graph for each task's rows, so that the gradient of one task's loss costs its own rows only.

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtrl_lightning.gradients import GradientMethod


def per_task_forward(
    method: GradientMethod | None, function: Callable[..., Tensor], dim: int, *rows: Tensor
) -> Tensor:
    """Return ``function(*rows)``, on a CPU computed task by task.

    For losses that are differentiated one by one. ``R`` backward passes, one for each task's loss,
    then cost about as much as one: a pass does not enter the other tasks' graphs. That pays on a
    CPU, where a small product costs little. A GPU takes all passes in one, batched, which cannot
    ask which rows of a gradient are zero.

    Args:
        method: differentiates the losses; one that takes the gradient of their mean in one pass
            needs no graph for each task. None if each loss is differentiated.
        function: maps rows ``[R, n, ...]`` to an output that has the tasks in the dimension
            ``dim``.
        dim: the dimension of the tasks in the output.
        rows: tensors ``[R, n, ...]``, the last one the rows' tasks; rows ``[B, ...]`` of any tasks
            are computed at once.
    """
    is_by_task = rows[-1].ndim > 1
    if not is_by_task or rows[0].device.type != "cpu" or (method and method.is_one_pass):
        return function(*rows)
    parts = zip(*(x_Rn.split(1) for x_Rn in rows), strict=True)
    joined: Tensor = _JoinTasks.apply(dim, *(function(*part) for part in parts))
    return joined


def task_losses(loss_Rn: Tensor, task_Rn: Tensor, task_R: Tensor) -> Tensor:
    """Return the mean over each task's rows, ``[R]``.

    Of rows of any tasks, each counts as much as any other: the mean of a task with fewer rows than
    the one with the most is reduced as much.

    Args:
        loss_Rn: losses ``[R, n]``, or ``[B]`` of any tasks.
        task_Rn: the rows' tasks.
        task_R: the trained tasks.
    """
    if loss_Rn.ndim > 1:
        return loss_Rn.mean(1)
    is_own_RB = task_R[:, None] == task_Rn
    return torch.where(is_own_RB, loss_Rn, 0.0).sum(1) / is_own_RB.sum(1).max()


class _JoinTasks(torch.autograd.Function):
    """Concatenate the tasks' outputs; backwards, leave out the tasks whose gradient is zero."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim = dim
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradients[0].split(1, ctx.dim)
        return None, *(part if bool(part.any()) else None for part in parts)
