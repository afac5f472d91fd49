"""Several MLPs of the same size, computed together.

Shapes: ``K`` experts, ``T`` tasks, ``R`` tasks of a batch, ``n`` rows of a task, ``B`` rows of any
tasks, ``D`` input features, ``H`` hidden features, ``O`` outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence, unpad_sequence

from mtrl_lightning.checks import at_least
from mtrl_lightning.networks.network import TaskAxis, is_captured, uniform_


class Experts(nn.Module):
    """Compute ``K`` MLPs with separate weights by batched matrix products.

    Weights are initialized He-uniform, biases with zeros.

    Args:
        num_experts: number of MLPs, ``K``.
        in_dim: number of input features.
        out_dim: number of outputs of each MLP.
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
            which_K: indices of the experts to compute, ascending; None for all.
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
    """Apply one MLP per task to the rows of this task.

    Rows in groups ``[R, n, D]``, one group per task, are computed directly. Rows of any tasks
    ``[B, D]`` are sorted by task, which synchronizes with a GPU, and padded to the largest number
    of rows; compiled and exported code cannot sort them and computes all MLPs for all rows.

    Args:
        num_tasks: number of tasks, ``T``.
        in_dim: number of input features.
        out_dim: number of outputs.
        width: size of a hidden layer.
        depth: number of hidden layers.
        output_bound: bound of the uniform initial values of the output layers (0: 1 / sqrt(width)).
    """

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

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features and tasks to outputs: ``[B, O]``, or ``[R, n, O]``."""
        if x_BD.ndim == 3:
            return self.experts(x_BD, task_B[:, 0])  # type: ignore[no-any-return]
        if is_captured():  # operations must not depend on the values of the tasks
            row_B = torch.arange(task_B.shape[0], device=task_B.device)
            return self.experts(x_BD)[task_B, row_B]  # type: ignore[no-any-return]
        order_B = task_B.argsort(stable=True)
        count_T = task_B.bincount(minlength=self.experts.num_experts).cpu()
        x_TnD = pad_sequence(x_BD[order_B].split(count_T.tolist()), batch_first=True)
        output_BO = torch.cat(unpad_sequence(self.experts(x_TnD), count_T, batch_first=True))
        return output_BO[order_B.argsort()]

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the MLPs."""
        return {name: TaskAxis(has_mean=False) for name, _ in self.named_parameters()}


def he_uniform_(weight: Tensor) -> None:
    """Fill matrices ``[..., D, H]`` uniformly within ``sqrt(6 / D)`` (He et al. 2015).

    They are applied as ``x @ W``, so that ``D`` is the number of inputs.
    """
    bound = math.sqrt(6 / weight.shape[-2])
    nn.init.uniform_(weight, -bound, bound)
