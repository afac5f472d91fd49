"""The hidden layers that most architectures use, with a faster implementation for CPUs.

Shapes: ``B`` batch, ``D`` input features, ``H`` hidden features, ``N`` rows that have a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrl_lightning.networks.network import check_layers, he_linear, is_captured
from mtrl_lightning.products import input_gradient, linear, weight_gradient

MAX_ROW_FRACTION = 0.75
"""Rows without a gradient are left out if at most this fraction of the rows has one."""
MIN_OUTPUTS = {torch.float32: 1 << 15, torch.bfloat16: 1 << 18}
"""Layers with fewer outputs, rows times width, are PyTorch's own, as are those of other types: one
function in Python takes longer to call than it saves. In bfloat16 PyTorch's products are oneDNN's
already, and only the rows that are left out are saved."""
ROW_MULTIPLE = 64
"""The number of rows in the backward pass is rounded up to a multiple of this."""
EPSILON = 1e-5
"""What LayerNorm adds to the variance, as PyTorch's does by default."""


class HiddenLayers(nn.Sequential):
    """Stack ``depth`` layers of Linear, optional LayerNorm and ReLU.

    Weights are initialized He-uniform, biases with zeros. On a CPU, large layers are one function
    with oneDNN's products. Its backward pass computes only the rows that have a gradient: the
    actor's loss has a gradient for a critic only where this critic is the smaller one, and the
    loss of a task only for the rows of this task.

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
            layers += [linear, nn.LayerNorm(width, EPSILON)] if layer_norm else [linear]
            layers.append(nn.ReLU())
        super().__init__(*layers)
        self._width = width
        self._layer_norm = layer_norm

    def forward(self, x_BD: Tensor) -> Tensor:
        """Map ``[B, D]`` to ``[B, H]``."""
        if is_captured() or not self._is_one_function(x_BD):
            return super().forward(x_BD)
        x_BD = x_BD.to(_product_dtype(x_BD))
        parameters: list[Tensor | None] = []
        for layer in self:
            if isinstance(layer, nn.Linear):
                parameters += [layer.weight.to(x_BD.dtype), layer.bias.to(x_BD.dtype)]
                if not self._layer_norm:
                    parameters += [None, None]
            elif isinstance(layer, nn.LayerNorm):
                parameters += [layer.weight, layer.bias]
        if torch.is_grad_enabled():
            return _Layers.apply(x_BD, *parameters)  # type: ignore[no-any-return]
        return _forward(x_BD, parameters)[-1].output_BH

    def _is_one_function(self, x_BD: Tensor) -> bool:
        if x_BD.device.type != "cpu" or x_BD.ndim != 2:
            return False
        min_outputs = MIN_OUTPUTS.get(_product_dtype(x_BD))
        return min_outputs is not None and len(x_BD) * self._width >= min_outputs


class _Layer(NamedTuple):
    """The parameters of a layer."""

    weight_HD: Tensor
    bias_H: Tensor
    scale_H: Tensor | None
    """LayerNorm's factor; None without LayerNorm, as is the next one."""
    shift_H: Tensor | None


class _Passed(NamedTuple):
    """What a layer's forward pass keeps for the backward pass."""

    output_BH: Tensor
    """After ReLU."""
    linear_BH: Tensor | None = None
    """Before LayerNorm; None without LayerNorm, as are the next two."""
    mean_B1: Tensor | None = None
    inverse_std_B1: Tensor | None = None

    def rows(self, row_N: Tensor) -> _Passed:
        """Return the same for some rows."""
        linear_BH, mean_B1, inverse_std_B1 = (x if x is None else x[row_N] for x in self[1:])
        return _Passed(self.output_BH[row_N], linear_BH, mean_B1, inverse_std_B1)


class _Layers(torch.autograd.Function):
    """Compute ``x_i = max(0, LN(x_(i-1) W_i' + b_i))`` layer by layer, ``LN`` being optional."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, *parameters: Tensor | None) -> Tensor:
        passed = _forward(x_BD, parameters)
        ctx.save_for_backward(x_BD, *parameters, *(kept for layer in passed for kept in layer))
        ctx.set_materialize_grads(False)
        return passed[-1].output_BH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weights, biases, and LayerNorm's parameters.

        With ``g_i`` the gradient of ``x_(i-1) W_i' + b_i``: ``dL/dx_(i-1) = g_i W_i``,
        ``dL/dW_i = g_i' x_(i-1)``, ``dL/db_i = sum_B g_i``.
        """
        (gradient_BH,) = gradients
        if gradient_BH is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        inputs = saved[: len(ctx.needs_input_grad)]
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient_BH):
            return _differentiable_gradients(inputs, gradient_BH, ctx.needs_input_grad)
        x_BD = inputs[0]
        layers = _layers(inputs[1:])
        needed = _by_layer(ctx.needs_input_grad[1:])
        passed = [_Passed(*kept) for kept in _by_layer(saved[len(inputs) :])]
        num_rows = len(gradient_BH)
        row_N = _rows_with_gradient(gradient_BH)
        if row_N is not None:
            gradient_BH = gradient_BH[row_N]
            x_BD = x_BD[row_N]
            passed = [layer.rows(row_N) for layer in passed]
        results: list[Tensor | None] = []
        for i in reversed(range(len(layers))):
            needs_weight, needs_bias, *needs_norm = needed[i]
            gradient_BH, *norm_gradients = _gradient_of_linear(
                gradient_BH, layers[i], passed[i], needs_norm
            )
            input_BD = x_BD if i == 0 else passed[i - 1].output_BH
            results += reversed(norm_gradients)
            results.append(gradient_BH.sum(0) if needs_bias else None)
            results.append(weight_gradient(gradient_BH, input_BD) if needs_weight else None)
            if i > 0 or ctx.needs_input_grad[0]:
                gradient_BH = input_gradient(gradient_BH, layers[i].weight_HD)
        if not ctx.needs_input_grad[0]:
            return (None, *reversed(results))
        if row_N is not None:
            zeros_BD = gradient_BH.new_zeros(num_rows, gradient_BH.shape[1])
            gradient_BH = zeros_BD.index_copy_(0, row_N, gradient_BH)
        return (gradient_BH, *reversed(results))


def _product_dtype(x_BD: Tensor) -> torch.dtype:
    """Return the type in which a linear map of the input is computed on a CPU."""
    if torch.is_autocast_enabled("cpu") and x_BD.dtype != torch.float64:
        return torch.get_autocast_dtype("cpu")
    return x_BD.dtype


def _by_layer(values: Sequence[Any]) -> list[Sequence[Any]]:
    """Return values in groups of four: a layer has four parameters, and keeps four tensors."""
    return [values[i : i + 4] for i in range(0, len(values), 4)]


def _layers(parameters: Sequence[Tensor | None]) -> list[_Layer]:
    return [_Layer(*own) for own in _by_layer(parameters)]


def _differentiable_gradients(
    inputs: Sequence[Any], gradient_BH: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients by PyTorch's own layers, for second derivatives and batched passes."""
    with torch.enable_grad():
        x_BH: Tensor = inputs[0]
        for layer in _layers(inputs[1:]):
            x_BH = F.linear(x_BH, layer.weight_HD, layer.bias_H)
            if layer.scale_H is not None:
                size = layer.scale_H.shape
                x_BH = F.layer_norm(x_BH, size, layer.scale_H, layer.shift_H, EPSILON)
            x_BH = x_BH.relu()
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    found = iter(
        torch.autograd.grad(x_BH, wanted, gradient_BH, create_graph=torch.is_grad_enabled())
    )
    return tuple(next(found) if need else None for need in needed)


def _forward(x_BD: Tensor, parameters: Sequence[Tensor | None]) -> list[_Passed]:
    passed: list[_Passed] = []
    for weight_HD, bias_H, scale_H, shift_H in _layers(parameters):
        linear_BH = linear(x_BD, weight_HD, bias_H)
        if scale_H is None:
            passed.append(_Passed(linear_BH.relu_()))  # oneDNN's ReLU would turn a NaN into 0
        else:
            normal_BH, mean_B1, inverse_std_B1 = torch.native_layer_norm(
                linear_BH, scale_H.shape, scale_H, shift_H, EPSILON
            )
            passed.append(_Passed(normal_BH.relu_(), linear_BH, mean_B1, inverse_std_B1))
        x_BD = passed[-1].output_BH
    return passed


def _gradient_of_linear(
    gradient_BH: Tensor, layer: _Layer, passed: _Passed, needs_norm: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of a layer's linear map and of LayerNorm's two parameters."""
    gradient_BH = torch.ops.aten.threshold_backward(gradient_BH, passed.output_BH, 0)
    if layer.scale_H is None:
        return gradient_BH, None, None
    return torch.ops.aten.native_layer_norm_backward(  # type: ignore[no-any-return]
        gradient_BH,
        passed.linear_BH,
        layer.scale_H.shape,
        passed.mean_B1,
        passed.inverse_std_B1,
        layer.scale_H,
        layer.shift_H,
        [True, *needs_norm],
    )


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
