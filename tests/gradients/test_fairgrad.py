"""FairGrad: the equation it solves, and the fairness of its update."""

import pytest
import torch

from mtrl_lightning.gradients.fairgrad import RIDGE, FairGrad, solve
from mtrl_lightning.gradients.nash_mtl import NashMTL
from tests.helpers.gradients import assert_near, random_gradients, update
from tests.helpers.specs import spec_of

ALPHAS = (0.5, 1.0, 2.0, 5.0)


def fair(alpha, gradients):
    return update(FairGrad(spec_of(len(gradients)), alpha=alpha), gradients)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("spread", [0, 1])
@pytest.mark.parametrize(("num_tasks", "size"), [(1, 3), (5, 8), (50, 80)])
def test_weights_solve_the_equation_and_give_the_direction(num_tasks, size, spread, alpha):
    gradients = random_gradients(num_tasks, size, seed=num_tasks).double()
    gradients *= torch.logspace(-spread, spread, num_tasks, dtype=torch.float64)[:, None]
    gram, norm = gradients @ gradients.t(), gradients.norm(dim=1)
    weight = solve(gram / torch.outer(norm, norm), norm, alpha) / norm
    assert weight.min() > 0
    # logarithms, because the weights span many powers of 10
    improvement = gram @ weight + RIDGE * gram.diagonal() * weight
    assert_near(improvement.log(), -weight.log() / alpha, atol=1e-4)
    # the ridge makes little difference
    shares = weight * (gram @ weight) ** alpha
    assert float((shares - 1).abs().max()) < (1e-2 if spread else 1e-3)
    found = fair(alpha, gradients).double()
    assert_near(found / found.norm(), weight @ gradients / (weight @ gradients).norm(), atol=1e-5)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(0.0, [0.5, 4.0]), (0.5, [1.5, 3.0]), (1.0, [2.25, 2.25]), (2.0, [3.0, 1.5])],
)
def test_two_orthogonal_tasks_by_hand(alpha, expected):
    # w = n^(-2 alpha / (1 + alpha)) for norms n of 1 and 8, so that w n is (1, 8), (1, 2), (1, 1)
    # and (1, 1/2); the shares of the mean norm 4.5 are in proportion to them
    assert_near(fair(alpha, torch.tensor([[1.0, 0.0], [0.0, 8.0]])), expected)


def test_an_alpha_of_1_is_nash_mtl_and_a_large_one_max_min_fair():
    gradients = random_gradients(5) * torch.logspace(-2, 2, 5)[:, None]
    gradients[3] = 0
    assert_near(fair(1.0, gradients), update(NashMTL(spec_of(5)), gradients), rtol=1e-4)
    gradients = random_gradients(5, 8) * torch.logspace(-1, 1, 5)[:, None]
    direction = fair(1000.0, gradients)
    direction /= direction.norm()
    weight = torch.linalg.lstsq(gradients.t(), direction).solution
    # no unit vector improves all tasks by more than the length of a convex combination
    bound = (weight / weight.sum() @ gradients).norm()
    assert weight.min() > -1e-5
    assert float((gradients @ direction).min()) == pytest.approx(float(bound), rel=2e-3)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradients_that_cancel_are_a_draw(alpha):
    assert_near(fair(alpha, torch.tensor([[1.0, 0.0], [-1.0, 0.0]])), [0.0, 0.0])
    assert_near(fair(alpha, torch.tensor([[2.0, 0.0], [-1.0, 0.0]])), [0.0, 0.0], atol=1e-5)
    # the third gradient is orthogonal to the two that cancel, which therefore weigh far more
    found = fair(alpha, torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]))
    assert_near(found[0], 0.0)
    assert 0 < found[1] < 0.02


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_zero_gradient_takes_no_part(alpha):
    gradients = torch.tensor([[2.0, 0.0], [1.0, 4.0]])
    padded = torch.cat([gradients, torch.zeros(1, 2)])
    assert_near(fair(alpha, padded), fair(alpha, gradients) * 2 / 3)  # of the mean norm


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 0.5, 2.0, 1e3])
def test_equal_gradients_and_one_that_is_tiny(alpha):
    gradients = torch.tensor([0.3, -0.5]).expand(10, 2)
    assert_near(fair(alpha, gradients), gradients[0])
    found = fair(alpha, torch.cat([gradients, torch.tensor([[1e-12, 0.0]])]))
    assert torch.isfinite(found).all()
    assert found.norm() > 0.1  # the ten tasks still learn
