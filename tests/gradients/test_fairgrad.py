"""FairGrad: the equation it solves, and the fairness of its update."""

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares, minimize

from mtrl_lightning.gradients.fairgrad import RIDGE, FairGrad, solve
from mtrl_lightning.gradients.nash_mtl import NashMTL
from tests.helpers.gradients import Problem, assert_near, random_gradients, update
from tests.helpers.specs import spec_of

ALPHAS = (0.5, 1.0, 2.0, 5.0)


def weights(gram, alpha):
    """Return ``w`` itself, before the update is scaled."""
    norm = gram.diagonal().sqrt()
    return solve(gram / torch.outer(norm, norm), norm, alpha) / norm


def gram_of(num_tasks, size, spread=0):
    """Return a random Gram matrix whose norms span ``10^(2 spread)``."""
    gradients = random_gradients(num_tasks, size, seed=num_tasks).double()
    gradients *= torch.logspace(-spread, spread, num_tasks, dtype=torch.float64)[:, None]
    return gradients @ gradients.t()


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("spread", [0, 1])
@pytest.mark.parametrize(("num_tasks", "size"), [(1, 3), (5, 8), (50, 80)])
def test_the_solution_solves_the_equation(num_tasks, size, spread, alpha):
    gram = gram_of(num_tasks, size, spread)
    weight = weights(gram, alpha)
    assert weight.min() > 0
    # logarithms, because the weights span many powers of 10
    improvement = gram @ weight + RIDGE * gram.diagonal() * weight
    assert_near(improvement.log(), -weight.log() / alpha, atol=1e-4)
    # the ridge makes little difference
    shares = weight * (gram @ weight) ** alpha
    assert float((shares - 1).abs().max()) < (1e-2 if spread else 1e-3)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("num_tasks", [2, 3, 6])
def test_it_equals_the_authors_least_squares(num_tasks, alpha):
    gram = gram_of(num_tasks, 12)
    numbers = gram.numpy()
    theirs = least_squares(
        lambda w: numbers @ w - w ** (-1 / alpha),
        np.ones(num_tasks),
        bounds=(0, np.inf),
        ftol=1e-15,
        xtol=1e-15,
        gtol=1e-15,
    )
    assert theirs.cost < 1e-20
    assert_near(weights(gram, alpha), theirs.x, rtol=1e-5)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(0.0, [0.5, 4.0]), (0.5, [1.5, 3.0]), (1.0, [2.25, 2.25]), (2.0, [3.0, 1.5])],
)
def test_two_orthogonal_tasks_by_hand(alpha, expected):
    # w = n^(-2 alpha / (1 + alpha)) for norms n of 1 and 8, so that w n is (1, 8), (1, 2), (1, 1)
    # and (1, 1/2); the shares of the mean norm 4.5 are in proportion to them
    assert_near(update(FairGrad(spec_of(2), alpha=alpha), [[1.0, 0.0], [0.0, 8.0]]), expected)


def test_an_alpha_of_1_is_nash_mtl():
    gradients = random_gradients(5) * torch.logspace(-2, 2, 5)[:, None]
    gradients[3] = 0
    assert_near(
        update(FairGrad(spec_of(5), alpha=1), gradients),
        update(NashMTL(spec_of(5)), gradients),
        rtol=1e-4,
    )


def largest_smallest_improvement(gradients):
    """Return ``max_d min_i g_i . d`` over unit vectors ``d``, by its dual problem.

    It is the norm of the shortest convex combination of the gradients.
    """
    gram = gradients.numpy() @ gradients.numpy().T
    num_tasks = len(gram)
    found = minimize(
        lambda w: w @ gram @ w / 2,
        np.full(num_tasks, 1 / num_tasks),
        jac=lambda w: gram @ w,
        method="SLSQP",
        bounds=[(0, 1)] * num_tasks,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return float(np.sqrt(found.x @ gram @ found.x))


@pytest.mark.parametrize("agreement", [0, 3])
@pytest.mark.parametrize("seed", range(2))
def test_a_large_alpha_is_max_min_fair(seed, agreement):
    gradients = random_gradients(5, 8, seed).double()
    gradients[:, 0] += agreement
    gradients *= torch.logspace(-1, 1, 5, dtype=torch.float64)[:, None]
    best = largest_smallest_improvement(gradients)
    ratios = []
    for alpha in (0.5, 2.0, 10.0, 100.0, 1000.0):
        found = update(FairGrad(spec_of(5), alpha=alpha), gradients).double()
        ratios.append(float((gradients @ found).min() / found.norm()) / best)
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.9
    assert 0.998 < ratios[-1] < 1 + 1e-5


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_that_cancel_are_a_draw(alpha):
    method = FairGrad(spec_of(2), alpha=alpha)
    assert_near(update(method, [[1.0, 0.0], [-1.0, 0.0]]), [0.0, 0.0])
    assert_near(update(method, [[2.0, 0.0], [-1.0, 0.0]]), [0.0, 0.0], atol=1e-5)
    # the third gradient is orthogonal to the two that cancel, which therefore weigh far more
    found = update(FairGrad(spec_of(3), alpha=alpha), [[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    assert_near(found[0], 0.0)
    assert 0 < found[1] < 0.02


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_zero_gradient_takes_no_part(alpha):
    gradients = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
    padded = torch.cat([gradients, torch.zeros(1, 2)])
    expected = update(FairGrad(spec_of(2), alpha=alpha), gradients) * 2 / 3  # of the mean norm
    assert_near(update(FairGrad(spec_of(3), alpha=alpha), padded), expected)


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 0.5, 2.0, 1e3])
def test_equal_gradients_and_one_that_is_tiny(alpha):
    gradients = torch.tensor([0.3, -0.5]).expand(10, 2)
    assert_near(update(FairGrad(spec_of(10), alpha=alpha), gradients), gradients[0])
    problem = Problem(torch.cat([gradients, torch.tensor([[1e-12, 0.0]])]))
    found = problem.update(FairGrad(spec_of(11), alpha=alpha))
    assert torch.isfinite(found).all()
    assert found.norm() > 0.1  # the ten tasks still learn
