"""MLP, and ensembles of networks, such as twin critics.

Shapes: ``B`` rows of any tasks ``[B]`` or of a training batch ``[R, n]``, ``D`` input features,
``Q`` members (critics).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning
from mtrl_lightning.networks.hidden import HiddenLayers, residual_layers
from mtrl_lightning.networks.network import Network, TaskAxis, output_linear
from mtrl_lightning.spec import EnvSpec


class MLP(Network):
    """Share all hidden layers and the output layer; the task is part of the input.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        spec: the tasks.
        width: size of a hidden layer; 400 in MetaWorld's protocols.
        depth: number of hidden layers, or of residual blocks; 3 in MetaWorld's protocols.
        layer_norm: whether LayerNorm follows each hidden layer's linear map.
        residual: whether the hidden layers are one layer and ``depth`` residual blocks, which
            always have LayerNorm.
        output_bound: bound of the uniform initial values of the output layer (0: 1 / sqrt(width)).
        conditioning: task conditioning, appended to the input; None for the algorithm's
            ``conditioning``, by default the one-hot task ID.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        spec: EnvSpec,
        *,
        width: int = 400,
        depth: int = 3,
        layer_norm: bool = False,
        residual: bool = False,
        output_bound: float = 3e-3,
        conditioning: Callable[[EnvSpec], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        self.conditioning = (conditioning or OneHot)(spec)
        self._num_features = in_dim
        in_dim += self.conditioning.out_dim
        self.trunk: nn.Module
        if residual:
            self.trunk = residual_layers(in_dim, width, depth)
        else:
            self.trunk = HiddenLayers(in_dim, width, depth, layer_norm)
        self.add_output(width, out_dim, spec, output_bound)

    def add_output(self, width: int, out_dim: int, spec: EnvSpec, output_bound: float) -> None:
        """Build the output layer after the hidden layers; called by the constructor."""
        self.head = output_linear(width, out_dim, output_bound)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        input_BD = torch.cat([x_BD, self.conditioning(task_B)], dim=-1)
        return self.head(self.trunk(input_BD))

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the columns of the first layer that multiply a one-hot task ID."""
        return self.conditioning.columns("trunk.0.weight", self._num_features)


class Ensemble(nn.Module):
    """Apply ``Q`` networks of the same architecture to the same input.

    Args:
        make: builds one network.
        size: number of networks, ``Q``.
    """

    def __init__(self, make: Callable[[], Network], size: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(make() for _ in range(size))

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, D]`` and ``[B]`` to ``[Q, B, out_dim]``."""
        return torch.stack([member(x_BD, task_B) for member in self.members])
