"""The hidden layers that most architectures share, and their cheaper form on a CPU.

Shapes: ``B`` batch, ``D`` input features, ``H`` hidden features, ``K`` rows that have a gradient.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrl_lightning.networks.network import check_layers, he_linear

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
"""Whether float32 products go to oneDNN, which on some processors is quicker than PyTorch's choice (MKL)."""
FEW_ROWS = 0.75
"""Share of rows with a gradient up to which the others are left out of the backward pass."""
ROWS = 64
"""Their number is rounded up to a multiple of this."""


class HiddenLayers(nn.Sequential):
    """``depth`` layers of Linear, LayerNorm if wanted, ReLU; He-uniform weights and zero biases.

    On a CPU, without LayerNorm, it is computed as one function with oneDNN's products, and
    backwards only for the rows that have a gradient. The actor's loss gives a critic one only where
    it is the smaller, and a single task's loss has one for this task's rows alone.

    Args:
        in_dim: features that come in.
        width: features of a hidden layer.
        depth: number of layers.
        layer_norm: whether LayerNorm follows each linear map.

    Raises:
        ConfigurationError: if there would be no layer or no feature.
    """

    def __init__(self, in_dim: int, width: int, depth: int, layer_norm: bool) -> None:
        check_layers(width, depth)
        layers: list[nn.Module] = []
        for i in range(depth):
            linear = he_linear(in_dim if i == 0 else width, width)
            layers += (
                [linear, nn.LayerNorm(width), nn.ReLU()] if layer_norm else [linear, nn.ReLU()]
            )
        super().__init__(*layers)
        self._layer_norm = layer_norm

    def forward(self, x_BD: Tensor) -> Tensor:
        """Map ``[B, D]`` to ``[B, H]``."""
        one_by_one = (
            self._layer_norm
            or x_BD.device.type != "cpu"
            or x_BD.ndim != 2
            or x_BD.dtype == torch.float64
        )
        if one_by_one or torch.compiler.is_compiling():
            return super().forward(x_BD)
        linears = [layer for layer in self if isinstance(layer, nn.Linear)]
        parameters: list[Tensor] = [
            parameter for linear in linears for parameter in (linear.weight, linear.bias)
        ]
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            x_BD, parameters = x_BD.to(dtype), [parameter.to(dtype) for parameter in parameters]
        if torch.is_grad_enabled():
            return _Layers.apply(x_BD, *parameters)  # type: ignore[no-any-return]
        return _outputs(x_BD, parameters)[-1]


class _Layers(torch.autograd.Function):
    """Linear maps, each followed by ReLU: ``x_i = max(0, x_(i-1) W_i' + b_i)``."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, *parameters: Tensor) -> Tensor:
        outputs = _outputs(x_BD, parameters)
        ctx.save_for_backward(x_BD, *parameters, *outputs)
        ctx.set_materialize_grads(False)
        return outputs[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weights and biases.

        With ``g_i = dL/dx_i [x_i > 0]``: ``dL/dx_(i-1) = g_i W_i``,
        ``dL/dW_i = g_i' x_(i-1)``, ``dL/db_i = sum_B g_i``.
        """
        depth, (gradient_BH,) = len(ctx.saved_tensors) // 3, gradients
        if gradient_BH is None:
            return (None,) * len(ctx.needs_input_grad)
        inputs, outputs = (
            ctx.saved_tensors[: 2 * depth + 1],
            [ctx.saved_tensors[0], *ctx.saved_tensors[2 * depth + 1 :]],
        )
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient_BH):
            return _differentiable_gradients(inputs, gradient_BH, ctx.needs_input_grad)
        weights, num_rows = inputs[1::2], len(gradient_BH)
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
            gradient_BH = gradient_BH.new_zeros(num_rows, gradient_BH.shape[1]).index_copy_(
                0, row_K, gradient_BH
            )
        return (gradient_BH, *reversed(results))


def _differentiable_gradients(
    inputs: Sequence[Tensor], gradient_BH: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients by PyTorch's own layers: they can be differentiated again, and computed for many at once."""
    with torch.enable_grad():
        x_BH = inputs[0]
        for weight_HD, bias_H in zip(inputs[1::2], inputs[2::2], strict=True):
            x_BH = F.linear(x_BH, weight_HD, bias_H).relu()
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    found = iter(
        torch.autograd.grad(x_BH, wanted, gradient_BH, create_graph=torch.is_grad_enabled())
    )
    return tuple(next(found) if need else None for need in needed)


def _outputs(x_BD: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the output ``[B, H]`` of each layer."""
    outputs: list[Tensor] = []
    for weight_HD, bias_H in zip(parameters[::2], parameters[1::2], strict=True):
        if _HAS_ONEDNN and x_BD.dtype == torch.float32:  # its own ReLU would turn a NaN into 0
            x_BD = torch.ops.mkldnn._linear_pointwise(
                x_BD, weight_HD, bias_H, "none", [], ""
            ).relu_()
        else:
            x_BD = F.linear(x_BD, weight_HD, bias_H).relu_()
        outputs.append(x_BD)
    return outputs


def _product(gradient_BH: Tensor, weight_HD: Tensor) -> Tensor:
    if _HAS_ONEDNN and gradient_BH.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(gradient_BH, weight_HD.t(), None, "none", [], "")  # type: ignore[no-any-return]
    return gradient_BH @ weight_HD


def _rows_with_gradient(gradient_BH: Tensor) -> Tensor | None:
    """Return the rows ``[K]`` that are not zero, or None if they are most.

    Some zero rows fill ``K`` up to a multiple of ``ROWS``: oneDNN compiles a kernel for every size
    that it meets.
    """
    is_zero_B = gradient_BH.abs().sum(1) == 0
    num_rows = -(-int((~is_zero_B).sum()) // ROWS) * ROWS
    return (
        is_zero_B.byte().argsort(stable=True)[:num_rows]
        if num_rows <= FEW_ROWS * len(gradient_BH)
        else None
    )
