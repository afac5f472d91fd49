"""Shared hidden layers, one head a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning
from mtrl_lightning.networks.experts import TaskExperts, tasks_in_order
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.network import Network, uniform_
from mtrl_lightning.networks.residual import ResidualLayers


class MultiHead(Network):
    """Hidden layers that all tasks share, and a head for each task.

    The task stays in the input too (MetaWorld+, McLean et al. 2025). With one task it equals an
    ``MLP``.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        width: features of a hidden layer; 400 in MetaWorld's protocols.
        depth: number of hidden layers, or of residual blocks; 3 in MetaWorld's protocols.
        layer_norm: whether LayerNorm follows each hidden layer's linear map.
        residual: whether the hidden layers are one layer and residual blocks, which always have
            LayerNorm.
        head_width: features of a hidden layer in each head, as in mtrl (Sodhani et al. 2021); 0 for
            linear heads.
        output_bound: the output layers start uniform within this bound (0 for 1 / sqrt(width)).
        conditioning: how the task is given to the shared layers; None for the algorithm's
            ``conditioning``, or else the one-hot.

    Raises:
        ConfigurationError: if ``head_width`` is negative.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        num_tasks: int,
        *,
        width: int = 400,
        depth: int = 3,
        layer_norm: bool = False,
        residual: bool = False,
        head_width: int = 0,
        output_bound: float = 3e-3,
        conditioning: Callable[[int], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        if head_width < 0:
            raise ConfigurationError(
                f"head_width is {head_width}: give a number of features, or 0 for linear heads"
            )
        self.conditioning = (conditioning or OneHot)(num_tasks)
        in_dim += self.conditioning.out_dim
        self.trunk: nn.Module = (
            ResidualLayers(in_dim, width, depth)
            if residual
            else HiddenLayers(in_dim, width, depth, layer_norm)
        )
        self.heads: nn.Module = (
            TaskExperts(
                num_tasks, width, out_dim, width=head_width, depth=1, output_bound=output_bound
            )
            if head_width
            else LinearHeads(width, out_dim, num_tasks, output_bound)
        )

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        return self.heads(self.trunk(torch.cat([x_BD, self.conditioning(task_B)], dim=-1)), task_B)  # type: ignore[no-any-return]

    def shared_parameters(self) -> Iterator[Parameter]:
        """Yield the parameters of all but the heads."""
        yield from self.conditioning.parameters()
        yield from self.trunk.parameters()


class LinearHeads(nn.Linear):
    """A linear map for each task.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        output_bound: weights and biases start uniform within this bound (0 for 1 / sqrt(in_dim)).
    """

    tasks_T1: Tensor

    def __init__(self, in_dim: int, out_dim: int, num_tasks: int, output_bound: float) -> None:
        super().__init__(in_dim, num_tasks * out_dim)
        self.num_tasks, self.out_dim = num_tasks, out_dim
        self.register_buffer("tasks_T1", torch.arange(num_tasks)[:, None], persistent=False)
        uniform_(self.weight, output_bound, in_dim)
        uniform_(self.bias, output_bound, in_dim)

    def forward(self, h_BH: Tensor, task_B: Tensor) -> Tensor:  # type: ignore[override]
        """Map features ``[B, H]`` and tasks ``[B]`` to ``[B, out_dim]``."""
        tasks_G = (
            tasks_in_order(task_B, self.tasks_T1) if task_B.device.type == "cpu" else None
        )  # a GPU is not stopped
        if tasks_G is not None:
            return self._own(h_BH.view(len(tasks_G), -1, h_BH.shape[1]), tasks_G).reshape(
                -1, self.out_dim
            )
        # all heads in one product, then the task's: cheaper than gathering a weight matrix for each
        # row, and than an index, whose gradient a GPU has to sort
        y_BTA = super().forward(h_BH).unflatten(-1, (self.num_tasks, self.out_dim))
        is_own_BT1 = (task_B[:, None] == self.tasks_T1[:, 0])[..., None]
        return torch.where(is_own_BT1, y_BTA, 0).sum(1, dtype=y_BTA.dtype)

    def _own(self, h_GnH: Tensor, tasks_G: Tensor) -> Tensor:
        """Map each task's features ``[G, n, H]`` to ``[G, n, out_dim]``."""
        weight_GAH = self.weight.view(self.num_tasks, self.out_dim, -1)
        bias_G1A = self.bias.view(self.num_tasks, 1, self.out_dim)
        if len(tasks_G) < self.num_tasks:
            weight_GAH, bias_G1A = weight_GAH[tasks_G], bias_G1A[tasks_G]
        if self.out_dim == 1:
            return ((h_GnH * weight_GAH).sum(-1, keepdim=True) + bias_G1A).to(h_GnH.dtype)
        return torch.baddbmm(bias_G1A, h_GnH, weight_GAH.transpose(1, 2))
