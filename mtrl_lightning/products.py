"""The matrix products of a linear layer on a CPU, and the gradients of its input and weight.

PyTorch multiplies float32 matrices by MKL, whose products use AVX-512 on Intel's processors only.
oneDNN's use it on AMD's, too: on a Zen 5 they take half of MKL's time, where matrices are large.

Shapes: ``B`` batch, ``D`` input features, ``H`` output features.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_ONEDNN = torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
"""Whether products in float32 are oneDNN's."""


def linear(x_BD: Tensor, weight_HD: Tensor, bias_H: Tensor | None = None) -> Tensor:
    """Return ``x W' + b``, ``[B, H]``, without a graph."""
    if HAS_ONEDNN and x_BD.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x_BD, weight_HD, bias_H, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x_BD, weight_HD, bias_H)


def input_gradient(gradient_BH: Tensor, weight_HD: Tensor) -> Tensor:
    """Return the gradient of the input, ``g W``, ``[B, D]``."""
    return linear(gradient_BH, weight_HD.t())


def weight_gradient(gradient_BH: Tensor, x_BD: Tensor) -> Tensor:
    """Return the gradient of the weight, ``g' x``, ``[H, D]``."""
    if len(gradient_BH) == 0:  # oneDNN refuses an empty sum
        return gradient_BH.t() @ x_BD
    return linear(gradient_BH.t(), x_BD.t())
