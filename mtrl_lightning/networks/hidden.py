"""Hidden layers: linear layers that are faster on CPUs, and residual layers.

On x86, PyTorch multiplies float32 matrices with MKL, which uses AVX-512 only on Intel CPUs. oneDNN
also uses it on AMD CPUs: large products take half of MKL's time on a Zen 5, and up to 15 % less on
a Zen 4.

Shapes: ``B`` batch, ``D`` input features, ``H`` hidden features, ``N`` rows with a gradient.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.networks.network import he_linear, is_captured

MAX_ROW_FRACTION = 0.75
"""Rows without a gradient are skipped if at most this fraction of the rows has one."""
MIN_OUTPUTS = {torch.float32: 1 << 15, torch.bfloat16: 1 << 18}
"""Minimum number of outputs, rows times width, of fused layers.

The fused function is written in Python and has more call overhead than PyTorch's layers. On one
core of a Zen 5, faster products in float32 outweigh it from 128 rows of width 256. In bfloat16
PyTorch uses oneDNN, too, and the only gain is from skipped rows. Other dtypes, such as float64, use
PyTorch's layers, because oneDNN is no faster.
"""
ROW_MULTIPLE = 64
"""The number of rows in the backward pass is rounded up to a multiple of this."""
HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
"""Whether to use oneDNN for float32 products on the CPU."""
EPSILON = 1e-5
"""Added to the variance by LayerNorm; PyTorch's default."""


class HiddenLayers(nn.Sequential):
    """Stack ``depth`` layers of Linear, optional LayerNorm and ReLU.

    Weights are initialized He-uniform, biases with zeros. On a CPU, large layers use one fused
    function with oneDNN products. Its backward pass computes only rows with a nonzero gradient: in
    the actor loss, a critic has a gradient only where it is the minimum, and a task's loss has one
    only for rows of the task.

    Args:
        in_dim: number of input features.
        width: size of a hidden layer.
        depth: number of hidden layers.
        layer_norm: whether LayerNorm follows each linear map.
    """

    def __init__(self, in_dim: int, width: int, depth: int, layer_norm: bool) -> None:
        at_least(1, width=width, depth=depth)
        layers: list[nn.Module] = []
        for i in range(depth):
            linear = he_linear(in_dim if i == 0 else width, width)
            layers += [linear, nn.LayerNorm(width, EPSILON)] if layer_norm else [linear]
            layers.append(nn.ReLU())
        super().__init__(*layers)
        self._width = width

    def forward(self, x_BD: Tensor) -> Tensor:
        """Map features ``[..., D]`` to ``[..., H]``."""
        if not self._is_fused(x_BD):
            return super().forward(x_BD)
        output_BH = self._fused(_cast(x_BD.flatten(0, -2)))
        return output_BH.view(*x_BD.shape[:-1], self._width)

    def _fused(self, x_BD: Tensor) -> Tensor:
        parameters: list[Tensor | None] = []
        linears = [layer for layer in self if isinstance(layer, nn.Linear)]
        norms = [layer for layer in self if isinstance(layer, nn.LayerNorm)]
        for i, linear in enumerate(linears):
            parameters += [_cast(linear.weight), _cast(linear.bias)]
            parameters += [norms[i].weight, norms[i].bias] if norms else [None, None]
        if torch.is_grad_enabled():
            return _FusedLayers.apply(x_BD, *parameters)  # type: ignore[no-any-return]
        for saved in _forward(x_BD, parameters):
            output_BH = saved.output_BH
        return output_BH

    def _is_fused(self, x_BD: Tensor) -> bool:
        if is_captured() or torch._C._are_functorch_transforms_active():
            return False
        if x_BD.device.type != "cpu" or x_BD.ndim < 2:
            return False
        min_outputs = MIN_OUTPUTS.get(_product_dtype(x_BD))
        num_rows = x_BD.shape[:-1].numel()
        return min_outputs is not None and num_rows * self._width >= min_outputs


class _Parameters(NamedTuple):
    """The parameters of a layer."""

    weight_HD: Tensor
    bias_H: Tensor
    scale_H: Tensor | None
    """LayerNorm's scale; None without LayerNorm, as is the next field."""
    shift_H: Tensor | None


class _Saved(NamedTuple):
    """Results of a layer's forward pass that the backward pass needs."""

    output_BH: Tensor
    """After ReLU."""
    linear_BH: Tensor | None = None
    """Input of LayerNorm; None without LayerNorm, as are the next two fields."""
    mean_B1: Tensor | None = None
    inverse_std_B1: Tensor | None = None


class _FusedLayers(torch.autograd.Function):
    """Compute ``x_i = max(0, LN(x_(i-1) W_i' + b_i))`` layer by layer, ``LN`` being optional."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, *parameters: Tensor | None) -> Tensor:
        layers = list(_forward(x_BD, parameters))
        ctx.save_for_backward(x_BD, *parameters, *(tensor for saved in layers for tensor in saved))
        ctx.set_materialize_grads(False)
        return layers[-1].output_BH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weights, biases, and LayerNorm's parameters.

        With ``g_i = LN'(dL/dx_i [x_i > 0])``, without ``LN'`` if there is no LayerNorm:
        ``dL/dx_(i-1) = g_i W_i``, ``dL/dW_i = g_i' x_(i-1)``, ``dL/db_i = sum_B g_i``.
        """
        (gradient_BH,) = gradients
        if gradient_BH is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors
        inputs = tensors[: len(ctx.needs_input_grad)]
        if torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(gradient_BH):
            return _differentiable_gradients(inputs, gradient_BH, ctx.needs_input_grad)
        x_BD, *parameters = inputs
        layers = _parameters_of_layers(parameters)
        saved = [_Saved(*own) for own in _in_fours(tensors[len(inputs) :])]
        needs_input, *needs_parameters = ctx.needs_input_grad
        needs = _in_fours(needs_parameters)
        num_rows = len(gradient_BH)
        row_N = _rows_with_gradient(gradient_BH)
        gradient_BH = _select(gradient_BH, row_N)
        results: list[Tensor | None] = []
        for i in reversed(range(len(layers))):
            needs_weight, needs_bias, *needs_norm = needs[i]
            gradient_BH, *norm_gradients = _activation_backward(
                gradient_BH, layers[i], saved[i], row_N, needs_norm
            )
            input_BD = x_BD if i == 0 else saved[i - 1].output_BH
            results += reversed(norm_gradients)
            results.append(gradient_BH.sum(0) if needs_bias else None)
            results.append(
                weight_gradient(gradient_BH, _select(input_BD, row_N)) if needs_weight else None
            )
            if i > 0 or needs_input:
                gradient_BH = input_gradient(gradient_BH, layers[i].weight_HD)
        if not needs_input:
            return (None, *reversed(results))
        if row_N is not None:
            zeros_BD = gradient_BH.new_zeros(num_rows, gradient_BH.shape[1])
            gradient_BH = zeros_BD.index_copy_(0, row_N, gradient_BH)
        return (gradient_BH, *reversed(results))


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype to which autocast would convert a linear layer's input on a CPU."""
    if torch.is_autocast_enabled("cpu") and tensor.dtype in (torch.float32, torch.bfloat16):
        return torch.get_autocast_dtype("cpu")
    return tensor.dtype


def _cast(tensor: Tensor) -> Tensor:
    return tensor.to(_product_dtype(tensor))


def _in_fours(values: Sequence[Any]) -> list[Sequence[Any]]:
    """Group values by layer: each has four parameters and saves four tensors."""
    return [values[i : i + 4] for i in range(0, len(values), 4)]


def _parameters_of_layers(parameters: Sequence[Tensor | None]) -> list[_Parameters]:
    return [_Parameters(*own) for own in _in_fours(parameters)]


def _forward(x_BD: Tensor, parameters: Sequence[Tensor | None]) -> Iterator[_Saved]:
    """Compute the layers in order."""
    for weight_HD, bias_H, scale_H, shift_H in _parameters_of_layers(parameters):
        linear_BH = linear_product(x_BD, weight_HD, bias_H)
        # oneDNN's fused ReLU would turn NaN into 0
        if scale_H is None:
            saved = _Saved(linear_BH.relu_())
        else:
            normal_BH, mean_B1, inverse_std_B1 = torch.native_layer_norm(
                linear_BH, scale_H.shape, scale_H, shift_H, EPSILON
            )
            saved = _Saved(normal_BH.relu_(), linear_BH, mean_B1, inverse_std_B1)
        yield saved
        x_BD = saved.output_BH


def _activation_backward(
    gradient_BH: Tensor,
    layer: _Parameters,
    saved: _Saved,
    row_N: Tensor | None,
    needs_norm: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient before LayerNorm and ReLU, and those of LayerNorm's scale and shift."""
    output_BH = _select(saved.output_BH, row_N)
    gradient_BH = torch.ops.aten.threshold_backward(gradient_BH, output_BH, 0)
    if layer.scale_H is None:
        return gradient_BH, None, None
    assert saved.linear_BH is not None
    assert saved.mean_B1 is not None
    assert saved.inverse_std_B1 is not None
    return torch.ops.aten.native_layer_norm_backward(  # type: ignore[no-any-return]
        gradient_BH,
        _select(saved.linear_BH, row_N),
        layer.scale_H.shape,
        _select(saved.mean_B1, row_N),
        _select(saved.inverse_std_B1, row_N),
        layer.scale_H,
        layer.shift_H,
        [True, *needs_norm],
    )


def _differentiable_gradients(
    inputs: Sequence[Any], gradient_BH: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return gradients computed by PyTorch's layers, for second derivatives and batched passes."""
    with torch.enable_grad():
        x_BH: Tensor = inputs[0]
        for layer in _parameters_of_layers(inputs[1:]):
            x_BH = F.linear(x_BH, layer.weight_HD, layer.bias_H)
            if layer.scale_H is not None:
                size = layer.scale_H.shape
                x_BH = F.layer_norm(x_BH, size, layer.scale_H, layer.shift_H, EPSILON)
            x_BH = x_BH.relu()
    differentiated = [x for x, need in zip(inputs, needed, strict=True) if need]
    gradients = iter(
        torch.autograd.grad(x_BH, differentiated, gradient_BH, create_graph=torch.is_grad_enabled())
    )
    return tuple(next(gradients) if need else None for need in needed)


def _select(rows_BH: Tensor, row_N: Tensor | None) -> Tensor:
    """Return the selected rows, or all if ``row_N`` is None."""
    return rows_BH if row_N is None else rows_BH[row_N]


def _rows_with_gradient(gradient_BH: Tensor) -> Tensor | None:
    """Return the indices ``[N]`` of nonzero rows, or None if most rows are nonzero.

    Zero rows pad ``N`` to a multiple of ``ROW_MULTIPLE``, because oneDNN compiles a kernel for each
    new size.
    """
    is_zero_B = gradient_BH.abs().sum(1) == 0
    num_nonzero = int((~is_zero_B).sum())
    num_rows = math.ceil(num_nonzero / ROW_MULTIPLE) * ROW_MULTIPLE
    if num_rows > MAX_ROW_FRACTION * len(gradient_BH):
        return None
    return is_zero_B.byte().argsort(stable=True)[:num_rows]


@torch.no_grad()
def linear_product(x_BD: Tensor, weight_HD: Tensor, bias_H: Tensor | None = None) -> Tensor:
    """Return ``x W' + b``, ``[B, H]``; not differentiable, because oneDNN's product is not."""
    if HAS_ONEDNN and x_BD.device.type == "cpu" and x_BD.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x_BD, weight_HD, bias_H, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x_BD, weight_HD, bias_H)


def input_gradient(gradient_BH: Tensor, weight_HD: Tensor) -> Tensor:
    """Return the gradient of the input, ``g W``, ``[B, D]``."""
    return linear_product(gradient_BH, weight_HD.t())


def weight_gradient(gradient_BH: Tensor, x_BD: Tensor) -> Tensor:
    """Return the gradient of the weight, ``g' x``, ``[H, D]``."""
    if len(gradient_BH) == 0:  # oneDNN does not support empty sums
        return gradient_BH.new_zeros(gradient_BH.shape[1], x_BD.shape[1])
    return linear_product(gradient_BH.t(), x_BD.t())


def residual_layers(in_dim: int, width: int, depth: int) -> nn.Sequential:
    """Return BroNet's hidden layers: Linear, LayerNorm and ReLU, then ``depth`` residual blocks.

    Nauman et al. 2024, "Bigger, Regularized, Optimistic: scaling for compute and sample-efficient
    continuous control"; Nauman et al. 2025, "Bigger, Regularized, Categorical: High-Capacity Value
    Functions are Efficient Multi-Task Learners". Weights are initialized He-uniform, biases with
    zeros.

    Args:
        in_dim: number of input features.
        width: size of every layer.
        depth: number of blocks with two linear layers each; 2 in the papers' critics, 1 in their
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
