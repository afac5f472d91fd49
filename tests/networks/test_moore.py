"""Orthogonal experts."""

from __future__ import annotations

import math

import pytest
import torch

from mtrl_lightning.networks.moore import MOORE, orthonormal
from tests.helpers.networks import (
    IN_DIM,
    NUM_TASKS,
    OUT_DIM,
    Dense,
    assert_equals_row_by_row,
    perceptron,
    uniform,
)
from tests.helpers.specs import spec_of


def make(**options):
    torch.manual_seed(0)
    sizes = {"width": 12, "depth": 3, "num_experts": 4, "output_bound": 0.5}
    return MOORE(IN_DIM, OUT_DIM, spec_of(NUM_TASKS), **{**sizes, **options})


def slow(network, x_D, task):
    """One row, classical Gram-Schmidt."""
    experts, basis = network.experts, []
    for k in range(experts.num_experts):
        u_H = perceptron(experts, k, x_D)
        rest_H = u_H - sum((u_H @ v_H) / (v_H @ v_H) * v_H for v_H in basis)
        basis.append(rest_H / rest_H.norm())
    w_K = network.mixture.weight @ network.conditioning(torch.tensor([task]))[0]
    features_H = torch.tanh(sum(w * v_H for w, v_H in zip(w_K, basis, strict=True)))
    rows = slice(task * OUT_DIM, (task + 1) * OUT_DIM)
    return network.heads.weight[rows] @ features_H + network.heads.bias[rows]


@pytest.mark.parametrize(
    "options", [{}, {"conditioning": Dense}, {"depth": 1, "num_experts": 1}, {"depth": 2}]
)
def test_it_is_the_papers_equations_row_by_row(options):
    # norms are divided by with a small number added
    assert_equals_row_by_row(make(**options), slow, tolerance=1e-7)


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


def test_half_precision_is_left_for_the_basis():
    assert orthonormal(uniform(3, 5, 16).bfloat16()).dtype == torch.float32
    basis_KBH = orthonormal(uniform(3, 5, 16).bfloat16())
    torch.testing.assert_close(
        torch.einsum("kbh,lbh->bkl", basis_KBH, basis_KBH), torch.eye(3).expand(5, 3, 3)
    )
    assert orthonormal(uniform(3, 5, 16).double()).dtype == torch.float64


def test_it_begins_within_its_bounds():
    network = make(width=200, num_experts=6)
    assert network.experts.weights[2].abs().max().item() == pytest.approx(
        math.sqrt(6 / 200), rel=0.01
    )
    assert network.mixture.weight.abs().max().item() <= math.sqrt(6 / (NUM_TASKS + 6))
    assert 0.48 < network.heads.weight.abs().max().item() <= 0.5
