"""Hidden layers with residual connections: BroNet.

Nauman et al. 2024, "Bigger, Regularized, Optimistic: scaling for compute and sample-efficient
continuous control"; Nauman et al. 2025, "Bigger, Regularized, Categorical: High-Capacity Value
Functions are Efficient Multi-Task Learners".

Shapes: ``B`` batch, ``H`` hidden features.
"""

from __future__ import annotations

from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.networks.network import he_linear


def residual_layers(in_dim: int, width: int, depth: int) -> nn.Sequential:
    """Return Linear, LayerNorm and ReLU, followed by ``depth`` residual blocks.

    Weights are initialized He-uniform, biases with zeros.

    Args:
        in_dim: number of input features.
        width: size of every layer.
        depth: number of blocks, of two linear layers each; 2 in the papers' critics, 1 in their
            actors.
    """
    at_least(1, width=width, depth=depth)
    blocks = (_Block(width) for _ in range(depth))
    return nn.Sequential(he_linear(in_dim, width), nn.LayerNorm(width), nn.ReLU(), *blocks)


class _Block(nn.Sequential):
    """Compute ``x + LN(W2 relu(LN(W1 x)))``."""

    def __init__(self, width: int) -> None:
        first = he_linear(width, width)
        second = he_linear(width, width)
        super().__init__(first, nn.LayerNorm(width), nn.ReLU(), second, nn.LayerNorm(width))

    def forward(self, x_BH: Tensor) -> Tensor:
        return x_BH + super().forward(x_BH)
