"""The orthonormal basis of MOORE; its equation is in the contract."""

from __future__ import annotations

import torch

from mtrl_lightning.networks.moore import orthonormal
from tests.helpers.networks import uniform


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
