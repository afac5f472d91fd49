"""The solvers of a GPU, which read no number, beside those of the host, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrl_lightning.gradients import aligned_mtl, cagrad, fairgrad
from mtrl_lightning.gradients.solving import solve_positive
from tests.helpers.gradients import METHODS, assert_near, random_gradients, update
from tests.helpers.specs import spec_of

KINDS = ("many parameters", "norms of 10^-2 to 10^2", "half the rank", "rank 2", "alike", "zeros")
SIZES = [
    (2, 2),
    (10, 1),
    *(pytest.param(*size, marks=pytest.mark.slow) for size in ((2, 6), (10, 4), (50, 1))),
]
"""Tasks, and Gram matrices of each kind."""
every_size = pytest.mark.parametrize(("num_tasks", "num_each"), SIZES)


def gram_of(num_tasks, kind, seed):
    """Return a random Gram matrix, computed in single precision and with a mean diagonal of 1."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"many parameters": 200, "half the rank": num_tasks // 2, "rank 2": 2, "alike": 60}
    size = sizes.get(kind, 2 * num_tasks)
    gradients = torch.randn(num_tasks, size, generator=generator)
    if kind.startswith("norms"):
        order = torch.randperm(num_tasks, generator=generator)
        gradients *= torch.logspace(-2, 2, num_tasks)[order][:, None]
    elif kind == "alike":
        gradients += 3 * torch.randn(1, size, generator=generator)
    elif kind == "zeros":
        gradients[: num_tasks // 3] = 0
        gradients[-1] = -gradients[-2]
    gram = (gradients @ gradients.t()).double()
    gram = (gram + gram.t()) / 2  # some processors round its two halves differently
    return gram / gram.diagonal().mean()


def grams(num_tasks, num_each):
    return [gram_of(num_tasks, kind, seed) for kind in KINDS for seed in range(num_each)]


def worst_case(gram, weight, mean_weight, c):
    """Return the smallest ``g_i . d`` of CAGrad's update, and how far it is from the mean."""
    distance = (1 + c) * weight - mean_weight
    return float((gram @ weight).min()), float((distance @ gram @ distance).clamp(min=0).sqrt())


@every_size
@pytest.mark.parametrize("c", [0.5, 0.9])
def test_cagrads_update_is_as_good_as_scipys(num_tasks, num_each, c):
    mean = torch.full((num_tasks,), 1 / num_tasks, dtype=torch.float64)
    for gram in grams(num_tasks, num_each):
        linear = gram @ mean
        radius = c * (mean @ linear).clamp(min=0).sqrt()

        def value(w, gram=gram, linear=linear, radius=radius):
            norm = cagrad.dual_norm(gram, w, cagrad.SMOOTHING**2)
            return float(linear @ w + radius * norm)

        w = cagrad.minimize_dual_by_steps(gram, linear, radius)
        theirs = cagrad.minimize_dual(gram.numpy(), linear.numpy(), float(radius))
        assert w.min() >= 0 and float(w.sum()) == pytest.approx(1, abs=1e-12)
        assert value(w) < value(torch.from_numpy(theirs)) + 5e-8
        # the primal problem's value is the dual's, where the norm is not the smoothed one
        if cagrad.dual_norm(gram, w, 0) > 0.05:
            weight = cagrad.weights_by_steps(gram, mean, c)
            improvement, distance = worst_case(gram, weight, mean, c)
            assert improvement * (1 + c) == pytest.approx(value(w), abs=1e-4)
            assert distance == pytest.approx(float(radius), rel=1e-5)


def test_cagrad_of_two_tasks_by_hand():
    # as in test_cagrad.py: all weight of the dual is on the second of (4, 0) and (0, 1)
    gram = torch.tensor([[16.0, 0], [0, 1]], dtype=torch.float64)
    mean = torch.tensor([0.5, 0.5], dtype=torch.float64)
    found = cagrad.weights_by_steps(gram, mean, 0.5)
    assert_near(found, [0.5 / 1.5, (0.5 + 0.5 * 4.25**0.5) / 1.5], atol=1e-7)


@every_size
@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, fairgrad.LARGEST_ALPHA])
def test_fairgrads_shares_are_those_of_the_host(num_tasks, num_each, alpha):
    for gram in grams(num_tasks, num_each):
        norm = gram.diagonal().sqrt()
        gram, norm = gram[norm > 0][:, norm > 0], norm[norm > 0]
        cosine = gram / torch.outer(norm, norm)
        found = fairgrad.solve_by_steps(cosine, norm, alpha)
        expected = fairgrad.solve(cosine, norm, alpha)
        assert_near(found / found.sum(), expected / expected.sum(), atol=1e-7, rtol=0)


@pytest.mark.parametrize(("alpha", "share"), [(0.5, 2.0), (1.0, 1.0), (2.0, 0.5)])
def test_fairgrad_of_two_orthogonal_tasks_by_hand(alpha, share):
    # norms of 1 and 8: see test_fairgrad.py
    norm = torch.tensor([1.0, 8.0], dtype=torch.float64)
    found = fairgrad.solve_by_steps(torch.eye(2, dtype=torch.float64), norm, alpha)
    assert_near(found / found[0], [1.0, share], atol=1e-5)


@every_size
def test_aligned_mtls_weights_are_those_of_the_host(num_tasks, num_each):
    for gram in grams(num_tasks, num_each):
        found = aligned_mtl.alignment_by_products(gram)
        expected = aligned_mtl.alignment(gram)
        assert_near(found, expected, atol=1e-8 * float(expected.abs().max()), rtol=0)


def test_aligned_mtl_of_two_tasks_by_hand():
    # (1, 0) and (-0.6, 0.8): B = sqrt(0.4) (1/sqrt(1.6) v v' + 1/sqrt(0.4) u u') for v = (1, -1)
    # and u = (1, 1), both divided by sqrt(2)
    gram = torch.tensor([[1, -0.6], [-0.6, 1]], dtype=torch.float64)
    assert_near(aligned_mtl.alignment_by_products(gram), [[0.75, 0.25], [0.25, 0.75]], atol=1e-9)


def test_a_tiny_eigenvalue_next_to_the_tolerance_gives_finite_weights():
    for factor in (0.5, 1 - 1e-9, 1.0, 1 + 1e-9, 2.0):
        small = 2 * aligned_mtl.TOLERANCE * factor
        gram = torch.tensor([[1.0, 0], [0, small]], dtype=torch.float64)
        found = aligned_mtl.alignment_by_products(gram)
        assert torch.isfinite(found).all() and found.abs().max() < 1 + 1e-6


@pytest.mark.parametrize("size", [1, 2, 50])
def test_elimination_solves_positive_systems(size):
    generator = np.random.default_rng(size)
    root = torch.from_numpy(generator.normal(size=(size, size)))
    matrix = root @ root.t() + 1e-3 * torch.eye(size)
    right = torch.from_numpy(generator.normal(size=(size, 2)))
    expected = np.linalg.solve(matrix.numpy(), right.numpy())
    assert_near(solve_positive(matrix, right), expected, rtol=1e-6)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    for module in (aligned_mtl, cagrad, fairgrad):
        monkeypatch.setattr(module, "is_readable", lambda x: False)


@pytest.mark.parametrize("zeros", [[], [1], [0, 1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("name", ["cagrad", "cagrad_fast", "fairgrad", "aligned_mtl"])
def test_a_gpus_update_is_that_of_the_host(name, zeros, request):
    gradients = random_gradients(4)
    gradients[zeros] = 0
    expected = update(METHODS[name](spec_of(4)), gradients)
    request.getfixturevalue("as_on_a_gpu")
    assert_near(update(METHODS[name](spec_of(4)), gradients), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["cagrad", "cagrad_fast", "fairgrad", "aligned_mtl"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_a_gpus_gradient(name, value, as_on_a_gpu):
    gradients = random_gradients(3)
    gradients[1, 0] = value
    assert not torch.isfinite(update(METHODS[name](spec_of(3)), gradients)).all()
