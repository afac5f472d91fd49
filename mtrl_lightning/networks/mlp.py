"""Multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning
from mtrl_lightning.networks.hidden import HiddenLayers
from mtrl_lightning.networks.network import Network, uniform_
from mtrl_lightning.networks.residual import ResidualLayers


class MLP(Network):
    """Hidden layers and an output layer that all tasks share; the task is part of the input.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        width: features of a hidden layer; 400 in MetaWorld's protocols.
        depth: number of hidden layers, or of residual blocks; 3 in MetaWorld's protocols.
        layer_norm: whether LayerNorm follows each hidden layer's linear map.
        residual: whether the hidden layers are one layer and residual blocks, which always have
            LayerNorm.
        output_bound: the output layer starts uniform within this bound (0 for 1 / sqrt(width)).
        conditioning: how the task is given to the network; None for the algorithm's
            ``conditioning``, or else the one-hot.
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
        output_bound: float = 3e-3,
        conditioning: Callable[[int], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        self.conditioning = (conditioning or OneHot)(num_tasks)
        in_dim += self.conditioning.out_dim
        self.trunk: nn.Module = (
            ResidualLayers(in_dim, width, depth)
            if residual
            else HiddenLayers(in_dim, width, depth, layer_norm)
        )
        self.head = nn.Linear(width, out_dim)
        uniform_(self.head.weight, output_bound, width)
        uniform_(self.head.bias, output_bound, width)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        return self.head(self.trunk(torch.cat([x_BD, self.conditioning(task_B)], dim=-1)))
