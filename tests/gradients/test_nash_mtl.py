"""Nash-MTL: the equation it solves."""

from itertools import pairwise

import pytest
import torch

from mtrl_lightning.gradients.nash_mtl import NashMTL, bargain
from tests.helpers.gradients import Problem, Quadratic, assert_near, random_gradients, update
from tests.helpers.specs import spec_of


@pytest.mark.parametrize(("num_tasks", "size"), [(2, 3), (5, 8), (50, 80)])
def test_the_solution_solves_the_equation(num_tasks, size):
    gradients = random_gradients(num_tasks, size, seed=num_tasks).double()
    gradients *= torch.logspace(-3, 3, num_tasks, dtype=torch.float64)[:, None]
    weight = bargain(gradients @ gradients.t())
    assert weight.min() > 0
    # a = s w with G a = 1 / a has one s: w (G w) is the same for every task
    residual = weight * (gradients @ gradients.t() @ weight)
    assert float((residual / residual.mean() - 1).abs().max()) < 2e-5
    norm = gradients.norm(dim=1)
    assert float((weight * norm).sum()) == pytest.approx(float(norm.mean()))


LENGTH = (2 + 18**0.5) / 4


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        # cosine r: 1 / sqrt(1 + r) for both, so the mean of the directions times the mean norm
        ([[2.0, 0.0], [-3.0, 3.0]], [LENGTH * (1 - 0.5**0.5), LENGTH * 0.5**0.5]),
        ([[1.0, 0.0], [-1.0, 0.0]], [0.0, 0.0]),
        ([[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]], [1.0, 1.0]),
    ],
)
def test_few_tasks_by_hand(gradients, expected):
    assert_near(update(NashMTL(spec_of(len(gradients))), gradients), expected)


def test_the_norm_is_limited_for_shared_parameters_only():
    gradients = random_gradients(3) * 100
    free, limited = Problem(gradients), Problem(gradients)
    direction = free.update(NashMTL(spec_of(3)))
    found = limited.update(NashMTL(spec_of(3), max_norm=1.5))
    assert_near(found, direction / direction.norm() * 1.5)
    assert torch.equal(limited.own[0].grad, free.own[0].grad)
    assert_near(update(NashMTL(spec_of(3), max_norm=1e6), gradients), direction)


def test_norm_limit_of_1_equals_the_authors_for_long_updates():
    # their update has norm sqrt(R) and is always clipped to 1; a shorter update stays shorter here
    limited = NashMTL(spec_of(2), max_norm=1.0)
    assert_near(update(limited, torch.eye(2) * 10), [0.5**0.5, 0.5**0.5])
    assert_near(update(limited, torch.eye(2) * 0.1), [0.05, 0.05])
    # numbers from their sequence of convex programs
    gradients = torch.tensor([[30.0, 0.0], [-15.0, 24.0]])
    assert_near(update(limited, gradients), [0.4848, 0.8746], atol=1e-4)


def test_weights_are_kept_and_applied_to_new_gradients():
    problem, method = Quadratic(random_gradients(3)), NashMTL(spec_of(3), update_every=3)
    kept = []
    for _ in range(7):
        problem.update(method, lr=0.1)
        kept.append(method.weight_R.clone())
        assert ("cosine" in method.metrics()) == (len(kept) in (1, 4, 7))
    same = [torch.equal(a, b) for a, b in pairwise(kept)]
    assert same == [True, True, False, True, True, False]
    gradients = random_gradients(3, seed=9)
    problem = Problem(gradients)
    assert_near(problem.update(method), kept[-1].float() @ gradients)
    assert_near(problem.own[0].grad, torch.tensor([1.0, 2.0, 3.0]) / 3)
    assert_near(method.metrics()["weight_max"], 3 * kept[-1].max())
