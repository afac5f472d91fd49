"""How a network is told the task.

Shapes: ``B`` batch, ``D`` features, ``T`` tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TaskConditioning(nn.Module):
    """Features and a task in, features that know the task out; built by a factory ``(num_tasks) -> TaskConditioning``.

    Args:
        num_tasks: number of tasks, ``T``.
    """

    extra_dim: int
    """Features that are added to those that come in."""

    def __init__(self, num_tasks: int) -> None:
        super().__init__()
        self.num_tasks = num_tasks

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, D]`` to ``[B, D + extra_dim]``."""
        raise NotImplementedError


class OneHot(TaskConditioning):
    """Append the task's one-hot vector.

    Args:
        num_tasks: number of tasks, ``T``.
    """

    table_TT: Tensor

    def __init__(self, num_tasks: int) -> None:
        super().__init__(num_tasks)
        self.extra_dim = num_tasks
        self.register_buffer("table_TT", torch.eye(num_tasks), persistent=False)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, D]`` to ``[B, D + T]``."""
        return torch.cat([x_BD, self.table_TT[task_B].to(x_BD.dtype)], dim=-1)
