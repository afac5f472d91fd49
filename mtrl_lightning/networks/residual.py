"""Hidden layers with residual connections: BroNet.

Nauman et al. 2024, "Bigger, Regularized, Optimistic: scaling for compute and sample-efficient
continuous control"; Nauman et al. 2025, "Bigger, Regularized, Categorical: High-Capacity Value
Functions are Efficient Multi-Task Learners".

Shapes: ``B`` batch, ``D`` input features, ``H`` hidden features.
"""

from __future__ import annotations

from torch import Tensor, nn

from mtrl_lightning.networks.network import check_layers, he_linear


class ResidualLayers(nn.Sequential):
    """Linear, LayerNorm, ReLU, then ``depth`` blocks; He-uniform weights and zero biases.

    Args:
        in_dim: features that come in.
        width: features of every layer.
        depth: number of blocks, of two linear maps each; 2 in the papers' critics, 1 in their
            actors.

    Raises:
        ConfigurationError: if there would be no block or no feature.
    """

    def __init__(self, in_dim: int, width: int, depth: int) -> None:
        check_layers(width, depth)
        blocks = (_Block(width) for _ in range(depth))
        super().__init__(he_linear(in_dim, width), nn.LayerNorm(width), nn.ReLU(), *blocks)


class _Block(nn.Sequential):
    """``x + LN(W2 relu(LN(W1 x)))``."""

    def __init__(self, width: int) -> None:
        first, second = he_linear(width, width), he_linear(width, width)
        super().__init__(first, nn.LayerNorm(width), nn.ReLU(), second, nn.LayerNorm(width))

    def forward(self, x_BH: Tensor) -> Tensor:
        return x_BH + super().forward(x_BH)
