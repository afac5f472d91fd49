"""The orthonormal basis of MOORE; its equation is in the contract."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.networks.moore import orthonormal
from tests.helpers.networks import uniform


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_basis_spans_what_the_vectors_span_in_their_order(scale):
    u_KBH = scale * uniform(4, 7, 10)
    basis_KBH = orthonormal(u_KBH)
    torch.testing.assert_close(basis_KBH.square().sum(-1), torch.ones(4, 7), rtol=1e-4, atol=1e-5)
    for k in range(1, 5):  # the first k vectors have no part outside of the first k of the basis
        q_KBH = basis_KBH[:k]
        inside_KBH = torch.einsum("kbh,lbh,lbg->kbg", u_KBH[:k], q_KBH, q_KBH)
        torch.testing.assert_close(inside_KBH, u_KBH[:k], rtol=1e-4, atol=1e-5 * scale)
    assert (u_KBH * basis_KBH).sum(-1).min() > 0


def test_vectors_of_zeros_have_finite_gradients():
    u_KBH = torch.zeros(3, 2, 4, requires_grad=True)
    basis_KBH = orthonormal(u_KBH)
    (basis_KBH * uniform(3, 2, 4)).sum().backward()
    assert not basis_KBH.any() and u_KBH.grad.isfinite().all()


def test_the_basis_of_half_precision_is_in_single_precision():
    basis_KBH = orthonormal(uniform(3, 5, 16).bfloat16())
    assert basis_KBH.dtype == torch.float32
    products_BKK = torch.einsum("kbh,lbh->bkl", basis_KBH, basis_KBH)
    torch.testing.assert_close(products_BKK, torch.eye(3).expand(5, 3, 3))
