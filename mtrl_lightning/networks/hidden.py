"""The hidden layers that most architectures use, with a faster implementation for CPUs.

Shapes: ``B`` batch, ``D`` input features, ``H`` hidden features, ``N`` rows that have a gradient.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrl_lightning.networks.network import check_layers, he_linear, is_captured

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
"""Whether float32 products use oneDNN: on some processors it is faster than MKL, the default."""
MAX_ROW_FRACTION = 0.75
"""Rows without a gradient are left out if at most this fraction of the rows has one."""
MIN_OUTPUTS = 1 << 16
"""Layers with fewer outputs, rows times width, are PyTorch's own: one function in Python takes
longer to call than it saves."""
ROW_MULTIPLE = 64
"""The number of rows in the backward pass is rounded up to a multiple of this."""


class HiddenLayers(nn.Sequential):
    """Stack ``depth`` layers of Linear, optional LayerNorm and ReLU.

    Weights are initialized He-uniform, biases with zeros. On a CPU and without LayerNorm, large
    layers are one function with oneDNN's products. Its backward pass computes only the rows that
    have a gradient: the actor's loss has a gradient for a critic only where this critic is the
    smaller one, and the loss of a task only for the rows of this task.

    Args:
        in_dim: number of input features.
        width: size of a hidden layer.
        depth: number of hidden layers.
        layer_norm: whether LayerNorm follows each linear map.

    Raises:
        ConfigurationError: if ``width`` or ``depth`` is below 1.
    """

    def __init__(self, in_dim: int, width: int, depth: int, layer_norm: bool) -> None:
        check_layers(width, depth)
        layers: list[nn.Module] = []
        for i in range(depth):
            linear = he_linear(in_dim if i == 0 else width, width)
            layers += [linear, nn.LayerNorm(width)] if layer_norm else [linear]
            layers.append(nn.ReLU())
        super().__init__(*layers)
        self._width = width
        self._layer_norm = layer_norm

    def forward(self, x_BD: Tensor) -> Tensor:
        """Map ``[B, D]`` to ``[B, H]``."""
        if is_captured() or not self._is_one_function(x_BD):
            return super().forward(x_BD)
        linears = [layer for layer in self if isinstance(layer, nn.Linear)]
        parameters: list[Tensor] = [
            parameter for linear in linears for parameter in (linear.weight, linear.bias)
        ]
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            x_BD = x_BD.to(dtype)
            parameters = [parameter.to(dtype) for parameter in parameters]
        if torch.is_grad_enabled():
            return _Layers.apply(x_BD, *parameters)  # type: ignore[no-any-return]
        return _outputs(x_BD, parameters)[-1]

    def _is_one_function(self, x_BD: Tensor) -> bool:
        return (
            not self._layer_norm
            and x_BD.device.type == "cpu"
            and x_BD.ndim == 2
            and x_BD.dtype != torch.float64
            and len(x_BD) * self._width >= MIN_OUTPUTS
        )


class _Layers(torch.autograd.Function):
    """Compute linear maps, each followed by ReLU: ``x_i = max(0, x_(i-1) W_i' + b_i)``."""

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
        (gradient_BH,) = gradients
        if gradient_BH is None:
            return (None,) * len(ctx.needs_input_grad)
        depth = len(ctx.saved_tensors) // 3  # saved: the input, 2 * depth parameters, depth outputs
        inputs = ctx.saved_tensors[: 2 * depth + 1]
        outputs = [ctx.saved_tensors[0], *ctx.saved_tensors[2 * depth + 1 :]]
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient_BH):
            return _differentiable_gradients(inputs, gradient_BH, ctx.needs_input_grad)
        weights = inputs[1::2]
        num_rows = len(gradient_BH)
        row_N = _rows_with_gradient(gradient_BH)
        if row_N is not None:
            gradient_BH = gradient_BH[row_N]
            outputs = [output[row_N] for output in outputs]
        results: list[Tensor | None] = []
        for i in reversed(range(depth)):
            gradient_BH = torch.ops.aten.threshold_backward(gradient_BH, outputs[i + 1], 0)
            needs_weight, needs_bias = ctx.needs_input_grad[2 * i + 1 : 2 * i + 3]
            results.append(gradient_BH.sum(0) if needs_bias else None)
            results.append(gradient_BH.t() @ outputs[i] if needs_weight else None)
            if i > 0 or ctx.needs_input_grad[0]:
                gradient_BH = _product(gradient_BH, weights[i])
        if not ctx.needs_input_grad[0]:
            return (None, *reversed(results))
        if row_N is not None:
            zeros_BD = gradient_BH.new_zeros(num_rows, gradient_BH.shape[1])
            gradient_BH = zeros_BD.index_copy_(0, row_N, gradient_BH)
        return (gradient_BH, *reversed(results))


def _differentiable_gradients(
    inputs: Sequence[Tensor], gradient_BH: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients by PyTorch's own layers, for second derivatives and batched passes."""
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
        if _HAS_ONEDNN and x_BD.dtype == torch.float32:  # oneDNN's ReLU would turn a NaN into 0
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
    """Return the rows ``[N]`` that are not zero, or None if most are not.

    Zero rows fill ``N`` up to a multiple of ``ROW_MULTIPLE``, because oneDNN compiles a kernel for
    each new size.
    """
    is_zero_B = gradient_BH.abs().sum(1) == 0
    num_nonzero = int((~is_zero_B).sum())
    num_rows = math.ceil(num_nonzero / ROW_MULTIPLE) * ROW_MULTIPLE
    if num_rows > MAX_ROW_FRACTION * len(gradient_BH):
        return None
    return is_zero_B.byte().argsort(stable=True)[:num_rows]
