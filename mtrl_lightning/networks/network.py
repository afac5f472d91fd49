"""What every architecture is, and the layers that they share.

Shapes: ``B`` batch, ``D`` input features, ``H`` hidden features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError


class Network(nn.Module):
    """Features and a task in, numbers out; built by a factory ``(in_dim, out_dim, num_tasks) -> Network``."""

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features ``[B, in_dim]`` and tasks ``[B]`` (integers) to ``[B, out_dim]``."""
        raise NotImplementedError

    def shared_parameters(self) -> Iterator[Parameter]:
        """Yield the parameters that several tasks use; a gradient method works on these."""
        return self.parameters()


def hidden_layers(in_dim: int, width: int, depth: int, layer_norm: bool) -> nn.Sequential:
    """Return ``depth`` layers of Linear, LayerNorm if wanted, ReLU; He-uniform weights and zero biases.

    Raises:
        ConfigurationError: if there would be no layer or no feature.
    """
    if depth < 1 or width < 1:
        raise ConfigurationError(f"a network's depth is {depth} and its width {width}: both must be at least 1")
    layers: list[nn.Module] = []
    for i in range(depth):
        linear = nn.Linear(in_dim if i == 0 else width, width)
        nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.LayerNorm(width), nn.ReLU()] if layer_norm else [linear, nn.ReLU()]
    return nn.Sequential(*layers)


def uniform_(parameter: Tensor, bound: float, fan_in: int) -> None:
    """Fill an output layer's parameter uniformly within ``bound``, or PyTorch's ``1 / sqrt(fan_in)`` if it is 0."""
    bound = bound or 1 / math.sqrt(fan_in)
    nn.init.uniform_(parameter, -bound, bound)
