"""Several multi-layer perceptrons of one size, computed together.

Shapes: ``K`` experts, ``T`` tasks, ``B`` batch, ``n`` rows of a task, ``D`` input features, ``H``
hidden features, ``O`` outputs.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.network import uniform_


class Experts(nn.Module):
    """``K`` perceptrons with weights of their own, as batched products; He-uniform weights and zero biases.

    Args:
        num_experts: number of perceptrons, ``K``.
        in_dim: features that come in.
        out_dim: numbers that come out of each.
        width: features of a hidden layer.
        depth: number of hidden layers, each followed by ReLU; 0 for one linear map.
        relu_last: whether ReLU follows the output layer too.

    Raises:
        ConfigurationError: if there would be no expert, no feature or a negative number of layers.
    """

    def __init__(
        self,
        num_experts: int,
        in_dim: int,
        out_dim: int,
        *,
        width: int,
        depth: int,
        relu_last: bool = False,
    ) -> None:
        super().__init__()
        require_at_least_one(num_experts=num_experts, in_dim=in_dim, out_dim=out_dim, width=width)
        if depth < 0:
            raise ConfigurationError(f"depth is {depth}: it must be at least 0")
        self.num_experts, self.out_dim, self._relu_last = num_experts, out_dim, relu_last
        sizes = list(pairwise([in_dim, *[width] * depth, out_dim]))
        self.weights = nn.ParameterList(
            torch.empty(num_experts, fan_in, out) for fan_in, out in sizes
        )
        self.biases = nn.ParameterList(torch.zeros(num_experts, 1, out) for _, out in sizes)
        for weight_KDH in self.weights:
            he_uniform_(weight_KDH)

    def forward(self, x_BD: Tensor, which_K: Tensor | None = None) -> Tensor:
        """Map ``[B, D]``, or an input for each expert ``[K, B, D]``, to ``[K, B, O]``; ``which_K`` or all are asked."""
        some = which_K is not None and len(which_K) < self.num_experts
        x_KBH = x_BD.expand(
            len(which_K) if which_K is not None else self.num_experts, *x_BD.shape[-2:]
        )
        for i, (weight_KDH, bias_K1H) in enumerate(zip(self.weights, self.biases, strict=True)):
            if some:
                weight_KDH, bias_K1H = weight_KDH[which_K], bias_K1H[which_K]
            x_KBH = torch.baddbmm(bias_K1H, x_KBH, weight_KDH)
            if self._relu_last or i + 1 < len(self.weights):
                x_KBH = x_KBH.relu()
        return x_KBH


class TaskExperts(nn.Module):
    """One perceptron a task, on this task's rows.

    Rows in any other order than task by task, or of one task, cost ``T`` times as much: all
    perceptrons see all rows, because a weight matrix for each row would not fit in memory. A GPU is
    waited for to find the order out; what is compiled or captured cannot ask, and always pays ``T``
    times.

    Args:
        num_tasks: number of tasks, ``T``.
        in_dim: features that come in.
        out_dim: numbers that come out.
        width: features of a hidden layer.
        depth: number of hidden layers.
        output_bound: the output layers start uniform within this bound (0 for 1 / sqrt(width)).
    """

    tasks_T1: Tensor

    def __init__(
        self,
        num_tasks: int,
        in_dim: int,
        out_dim: int,
        *,
        width: int,
        depth: int,
        output_bound: float,
    ) -> None:
        super().__init__()
        self.experts = Experts(num_tasks, in_dim, out_dim, width=width, depth=depth)
        uniform_(self.experts.weights[-1], output_bound, width)
        uniform_(self.experts.biases[-1], output_bound, width)
        self.register_buffer("tasks_T1", torch.arange(num_tasks)[:, None], persistent=False)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, D]`` and ``[B]`` to ``[B, O]``."""
        tasks_G = tasks_in_order(task_B, self.tasks_T1)
        if tasks_G is not None:
            return self.experts(x_BD.view(len(tasks_G), -1, x_BD.shape[1]), tasks_G).flatten(0, 1)  # type: ignore[no-any-return]
        return self.experts(x_BD)[task_B, torch.arange(len(task_B), device=task_B.device)]  # type: ignore[no-any-return]


def is_task_major(task_B: Tensor, tasks_T1: Tensor) -> bool:
    """Return whether each task has the same number of rows, in order; False where nothing may be asked."""
    if torch.compiler.is_compiling() or (
        task_B.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return False
    n, rest = divmod(len(task_B), len(tasks_T1))
    return bool(n) and not rest and torch.equal(task_B.reshape(-1, n), tasks_T1.expand(-1, n))


def tasks_in_order(task_B: Tensor, tasks_T1: Tensor) -> Tensor | None:
    """Return which tasks the rows are of if each has the same number of rows, in order: all tasks, or a single one.

    None for rows in another order, or where nothing may be asked. On a GPU, a single task is not
    looked for.
    """
    if is_task_major(task_B, tasks_T1):
        return tasks_T1[:, 0]
    alone = task_B.device.type == "cpu" and len(task_B) > 0 and not torch.compiler.is_compiling()
    return task_B[:1] if alone and bool((task_B == task_B[0]).all()) else None


def he_uniform_(weight: Tensor) -> None:
    """Fill matrices ``[..., D, H]`` that multiply from the right uniformly within ``sqrt(6 / D)`` (He et al. 2015)."""
    bound = math.sqrt(6 / weight.shape[-2])
    nn.init.uniform_(weight, -bound, bound)


def require_at_least_one(**sizes: int) -> None:
    """Refuse sizes below 1.

    Raises:
        ConfigurationError: naming the first of them.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ConfigurationError(f"{name} is {size}: it must be at least 1")
