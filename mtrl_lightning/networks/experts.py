"""Several multi-layer perceptrons of one size, computed together.

Shapes: ``K`` experts, ``T`` tasks, ``R`` tasks of a batch in task order, ``B`` batch, ``n`` rows of
a task, ``D`` input features, ``H`` hidden features, ``O`` outputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.networks.capture import is_captured
from mtrl_lightning.networks.network import uniform_


class Experts(nn.Module):
    """Compute ``K`` perceptrons as batched products.

    Each has its own weights. Weights are initialized He-uniform, biases with zeros.

    Args:
        num_experts: number of perceptrons, ``K``.
        in_dim: number of input features.
        out_dim: number of outputs of each perceptron.
        width: size of a hidden layer.
        depth: number of hidden layers, each followed by ReLU; 0 for one linear map.
        relu_last: whether ReLU also follows the output layer.
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
        at_least(1, num_experts=num_experts, in_dim=in_dim, out_dim=out_dim, width=width)
        at_least(0, depth=depth)
        self.num_experts = num_experts
        self.out_dim = out_dim
        self._relu_last = relu_last
        sizes = list(pairwise([in_dim, *[width] * depth, out_dim]))
        self.weights = nn.ParameterList(
            torch.empty(num_experts, fan_in, out) for fan_in, out in sizes
        )
        self.biases = nn.ParameterList(torch.zeros(num_experts, 1, out) for _, out in sizes)
        for weight_KDH in self.weights:
            he_uniform_(weight_KDH)

    def forward(self, x_BD: Tensor, which_K: Tensor | None = None) -> Tensor:
        """Map one input ``[B, D]``, or one per expert ``[K, B, D]``, to ``[K, B, O]``.

        Args:
            x_BD: the input.
            which_K: indices of the experts to compute; None for all.
        """
        num_computed = self.num_experts if which_K is None else len(which_K)
        is_subset = num_computed < self.num_experts
        x_KBH = x_BD.expand(num_computed, *x_BD.shape[-2:])
        for i, (weight_KDH, bias_K1H) in enumerate(zip(self.weights, self.biases, strict=True)):
            if is_subset:
                weight_KDH = weight_KDH[which_K]
                bias_K1H = bias_K1H[which_K]
            x_KBH = torch.baddbmm(bias_K1H, x_KBH, weight_KDH)
            if self._relu_last or i + 1 < len(self.weights):
                x_KBH = x_KBH.relu()
        return x_KBH


class TaskExperts(nn.Module):
    """Apply one perceptron per task to the rows of this task.

    This is cheap for rows in task order with the same number of rows per task, and for rows of one
    task. Any other order costs ``T`` times as much: all perceptrons compute all rows, because one
    weight matrix per row would not fit in memory. Checking the order waits for a GPU. Compiled code
    and captured CUDA graphs cannot check it and always pay ``T`` times the cost.

    Args:
        num_tasks: number of tasks, ``T``.
        in_dim: number of input features.
        out_dim: number of outputs.
        width: size of a hidden layer.
        depth: number of hidden layers.
        output_bound: bound of the uniform initial values of the output layers (0: 1 / sqrt(width)).
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
        tasks_R = tasks_in_order(task_B, self.tasks_T1)
        if tasks_R is not None:
            x_RnD = x_BD.view(len(tasks_R), -1, x_BD.shape[1])
            return self.experts(x_RnD, tasks_R).flatten(0, 1)  # type: ignore[no-any-return]
        row_B = torch.arange(task_B.shape[0], device=task_B.device)
        return self.experts(x_BD)[task_B, row_B]  # type: ignore[no-any-return]

    def own_tasks(self, train_tasks: Sequence[int]) -> Collection[int]:
        """Return the trained tasks; the mean of their outputs stands for the others'."""
        return train_tasks


def is_task_major(task_B: Tensor, tasks_T1: Tensor) -> bool:
    """Return whether the rows are in task order, with the same number of rows for every task.

    The answer is False in compiled, exported and traced code and in captured CUDA graphs, which
    cannot look at the values.
    """
    if is_captured():
        return False
    if task_B.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    n, rest = divmod(len(task_B), len(tasks_T1))
    return bool(n) and not rest and torch.equal(task_B.reshape(-1, n), tasks_T1.expand(-1, n))


def tasks_in_order(task_B: Tensor, tasks_T1: Tensor) -> Tensor | None:
    """Return the tasks ``[R]`` of rows in task order: all tasks, or a single one.

    All tasks must have the same number of rows. None for rows in another order, in compiled,
    exported and traced code, and in captured CUDA graphs. On a GPU a single task is not searched
    for.
    """
    if is_task_major(task_B, tasks_T1):
        return tasks_T1[:, 0]
    can_look = task_B.device.type == "cpu" and not is_captured()
    if can_look and len(task_B) > 0 and bool((task_B == task_B[0]).all()):
        return task_B[:1]
    return None


def he_uniform_(weight: Tensor) -> None:
    """Fill matrices ``[..., D, H]`` uniformly within ``sqrt(6 / D)`` (He et al. 2015).

    The matrices multiply the input from the right, so that ``D`` is the number of inputs.
    """
    bound = math.sqrt(6 / weight.shape[-2])
    nn.init.uniform_(weight, -bound, bound)
