"""The hidden layers that most architectures share, and their cheaper form on a CPU.

Shapes: ``B`` batch, ``D`` input features, ``H`` hidden features, ``K`` rows that have a gradient.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError

_HAS_FUSED_LAYER = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
_FUSED_TYPES = (torch.float32, torch.bfloat16)
FEW_ROWS = 0.75
"""Share of rows with a gradient up to which the others are left out of the backward pass."""
ROWS = 64
"""Their number is rounded up to a multiple of this."""


class HiddenLayers(nn.Sequential):
    """``depth`` layers of Linear, LayerNorm if wanted, ReLU; He-uniform weights and zero biases.

    On a CPU, without LayerNorm, it is computed as one function: each layer in one call of oneDNN, and backwards only
    for the rows that have a gradient. The actor's loss gives a critic one only where it is the smaller, and a single
    task's loss has one for this task's rows alone.

    Args:
        in_dim: features that come in.
        width: features of a hidden layer.
        depth: number of layers.
        layer_norm: whether LayerNorm follows each linear map.

    Raises:
        ConfigurationError: if there would be no layer or no feature.
    """

    def __init__(self, in_dim: int, width: int, depth: int, layer_norm: bool) -> None:
        if depth < 1 or width < 1:
            raise ConfigurationError(f"a network's depth is {depth} and its width {width}: both must be at least 1")
        layers: list[nn.Module] = []
        for i in range(depth):
            linear = nn.Linear(in_dim if i == 0 else width, width)
            nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.LayerNorm(width), nn.ReLU()] if layer_norm else [linear, nn.ReLU()]
        super().__init__(*layers)
        self._plain = layer_norm

    def forward(self, x_BD: Tensor) -> Tensor:
        """Map ``[B, D]`` to ``[B, H]``."""
        if self._plain or x_BD.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x_BD)
        parameters: list[Tensor] = list(self.parameters())
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            x_BD, parameters = x_BD.to(dtype), [parameter.to(dtype) for parameter in parameters]
        if torch.is_grad_enabled():
            return _Layers.apply(x_BD, *parameters)  # type: ignore[no-any-return]
        for weight_HD, bias_H in zip(parameters[::2], parameters[1::2], strict=True):
            x_BD = _layer(x_BD, weight_HD, bias_H)
        return x_BD


class _Layers(torch.autograd.Function):
    """Linear maps, each followed by ReLU: ``x_i = max(0, x_(i-1) W_i' + b_i)``."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, *parameters: Tensor) -> Tensor:
        outputs = [x_BD]
        for weight_HD, bias_H in zip(parameters[::2], parameters[1::2], strict=True):
            outputs.append(_layer(outputs[-1], weight_HD, bias_H))
        ctx.save_for_backward(*outputs, *parameters[::2])
        return outputs[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weights and biases.

        With ``g_i = dL/dx_i [x_i > 0]``: ``dL/dx_(i-1) = g_i W_i``,
        ``dL/dW_i = g_i' x_(i-1)``, ``dL/db_i = sum_B g_i``.
        """
        depth = len(ctx.saved_tensors) // 2
        outputs, weights = list(ctx.saved_tensors[: depth + 1]), ctx.saved_tensors[depth + 1 :]
        gradient_BH = gradients[0]
        num_rows = len(gradient_BH)
        row_K = _rows_with_gradient(gradient_BH)
        if row_K is not None:
            gradient_BH, outputs = gradient_BH[row_K], [output[row_K] for output in outputs]
        results: list[Tensor | None] = []
        for i in reversed(range(depth)):
            gradient_BH = torch.ops.aten.threshold_backward(gradient_BH, outputs[i + 1], 0)
            of_weight, of_bias = ctx.needs_input_grad[2 * i + 1 : 2 * i + 3]
            results.append(gradient_BH.sum(0) if of_bias else None)
            results.append(gradient_BH.t() @ outputs[i] if of_weight else None)
            if i > 0 or ctx.needs_input_grad[0]:
                gradient_BH = _product(gradient_BH, weights[i])
        if not ctx.needs_input_grad[0]:
            return (None, *reversed(results))
        if row_K is not None:
            gradient_BH = gradient_BH.new_zeros(num_rows, gradient_BH.shape[1]).index_copy_(0, row_K, gradient_BH)
        return (gradient_BH, *reversed(results))


def _layer(x_BD: Tensor, weight_HD: Tensor, bias_H: Tensor) -> Tensor:
    if _HAS_FUSED_LAYER and x_BD.dtype in _FUSED_TYPES:
        return torch.ops.mkldnn._linear_pointwise(x_BD, weight_HD, bias_H, "relu", [], "")  # type: ignore[no-any-return]
    return F.linear(x_BD, weight_HD, bias_H).relu_()


def _product(gradient_BH: Tensor, weight_HD: Tensor) -> Tensor:
    if _HAS_FUSED_LAYER and gradient_BH.dtype in _FUSED_TYPES:
        return torch.ops.mkldnn._linear_pointwise(gradient_BH, weight_HD.t(), None, "none", [], "")  # type: ignore[no-any-return]
    return gradient_BH @ weight_HD


def _rows_with_gradient(gradient_BH: Tensor) -> Tensor | None:
    """Return the rows ``[K]`` that are not zero, or None if they are most.

    Some zero rows fill ``K`` up to a multiple of ``ROWS``: oneDNN compiles a kernel for every size that it meets.
    """
    is_zero_B = gradient_BH.abs().sum(1) == 0
    num_rows = -(-int((~is_zero_B).sum()) // ROWS) * ROWS
    return is_zero_B.byte().argsort(stable=True)[:num_rows] if num_rows <= FEW_ROWS * len(gradient_BH) else None
