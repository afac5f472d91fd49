"""Shared hidden layers, one output layer a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.network import Network, uniform_


class MultiHead(Network):
    """Hidden layers that all tasks share, and an output layer for each task.

    The task stays in the input too (MetaWorld+, McLean et al. 2025). With one task it equals an ``MLP``.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        width: features of a hidden layer; 400 in MetaWorld's protocols.
        depth: number of hidden layers; 3 in MetaWorld's protocols.
        layer_norm: whether LayerNorm follows each hidden layer's linear map.
        output_bound: the output layers start uniform within this bound (0 for 1 / sqrt(width)).
        conditioning: how the shared layers are told the task.
    """

    tasks_T1: Tensor

    def __init__(
        self, in_dim: int, out_dim: int, num_tasks: int, *, width: int = 400, depth: int = 3, layer_norm: bool = False,
        output_bound: float = 3e-3, conditioning: Callable[[int], TaskConditioning] = OneHot,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_tasks, self.out_dim = num_tasks, out_dim
        self.register_buffer("tasks_T1", torch.arange(num_tasks)[:, None], persistent=False)
        self.conditioning = conditioning(num_tasks)
        self.trunk = HiddenLayers(in_dim + self.conditioning.extra_dim, width, depth, layer_norm)
        self.heads = nn.Linear(width, num_tasks * out_dim)
        uniform_(self.heads.weight, output_bound, width)
        uniform_(self.heads.bias, output_bound, width)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        h_BH = self.trunk(self.conditioning(x_BD, task_B))
        if self._is_task_major(task_B):
            return self._own_heads(h_BH.view(self.num_tasks, -1, h_BH.shape[1])).reshape(-1, self.out_dim)
        # all heads in one product, then the task's: cheaper than gathering a weight matrix for each row
        y_BTA = self.heads(h_BH).unflatten(-1, (self.num_tasks, self.out_dim))
        return y_BTA[torch.arange(len(task_B), device=task_B.device), task_B]

    def _own_heads(self, h_TnH: Tensor) -> Tensor:
        """Map each task's features ``[T, n, H]`` to ``[T, n, out_dim]``."""
        weight_TAH = self.heads.weight.view(self.num_tasks, self.out_dim, -1)
        bias_T1A = self.heads.bias.view(self.num_tasks, 1, self.out_dim)
        if self.out_dim == 1:
            return ((h_TnH * weight_TAH).sum(-1, keepdim=True) + bias_T1A).to(h_TnH.dtype)
        return torch.baddbmm(bias_T1A, h_TnH, weight_TAH.transpose(1, 2))

    def _is_task_major(self, task_B: Tensor) -> bool:
        """Return whether each task has the same number of rows, in order; a GPU is not stopped to find out."""
        n, rest = divmod(len(task_B), self.num_tasks)
        if not n or rest or task_B.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        return torch.equal(task_B.view(-1, n), self.tasks_T1.expand(-1, n))

    def shared_parameters(self) -> Iterator[Parameter]:
        """Yield the parameters of all but the heads."""
        yield from self.conditioning.parameters()
        yield from self.trunk.parameters()
