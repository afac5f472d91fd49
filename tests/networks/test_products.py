"""The products of a linear layer, beside those of PyTorch in double precision."""

from __future__ import annotations

import platform

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtrl_lightning.networks import hidden
from tests.helpers.networks import uniform

X_BD = uniform(6, 5, seed=1)
WEIGHT_HD = uniform(4, 5, seed=2)
BIAS_H = uniform(4, seed=3)
GRADIENT_BH = uniform(6, 4, seed=4)


class Called(TorchDispatchMode):
    """Names of the operations that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def all_products(dtype, device="cpu"):
    x_BD, weight_HD, bias_H, gradient_BH = (
        x.to(device, dtype) for x in (X_BD, WEIGHT_HD, BIAS_H, GRADIENT_BH)
    )
    return [
        hidden.linear_product(x_BD, weight_HD, bias_H),
        hidden.linear_product(x_BD, weight_HD),
        hidden.input_gradient(gradient_BH, weight_HD),
        hidden.weight_gradient(gradient_BH, x_BD),
    ]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 3e-2), (torch.float64, 1e-14)],
)
@pytest.mark.parametrize("has_onednn", [False, True])
def test_products_are_those_of_numpy(dtype, tolerance, has_onednn, monkeypatch):
    if has_onednn and not hidden.HAS_ONEDNN:
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(hidden, "HAS_ONEDNN", has_onednn)
    x_BD, weight_HD, bias_H, gradient_BH = (
        x.double().numpy() for x in (X_BD, WEIGHT_HD, BIAS_H, GRADIENT_BH)
    )
    wanted = [
        x_BD @ weight_HD.T + bias_H,
        x_BD @ weight_HD.T,
        gradient_BH @ weight_HD,
        gradient_BH.T @ x_BD,
    ]
    for own, right in zip(all_products(dtype), wanted, strict=True):
        assert own.dtype == dtype and own.is_contiguous()
        torch.testing.assert_close(
            own.double(), torch.from_numpy(right), rtol=tolerance, atol=tolerance
        )


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's are for x86")
def test_each_product_in_float32_is_onednns():
    with Called() as called:
        all_products(torch.float32)
    multiplied = [name for name in called.names if "linear" in name or "mm" in name]
    assert multiplied == ["mkldnn._linear_pointwise.default"] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_no_rows_is_zero(dtype):
    gradient_HD = hidden.weight_gradient(torch.zeros(0, 4, dtype=dtype), torch.zeros(0, 5))
    assert gradient_HD.shape == (4, 5) and gradient_HD.dtype == dtype and not gradient_HD.any()
