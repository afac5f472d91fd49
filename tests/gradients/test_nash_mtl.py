"""Nash-MTL: its length, limit and kept weights; its direction is in test_torchjd.py."""

from itertools import pairwise

import pytest
import torch

from mtrl_lightning.gradients.nash_mtl import NashMTL
from tests.helpers.gradients import Problem, Quadratic, assert_near, random_gradients, update
from tests.helpers.specs import spec_of

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
    # numbers from their sequence of convex programs
    gradients = torch.tensor([[30.0, 0.0], [-15.0, 24.0]])
    found = update(NashMTL(spec_of(2), max_norm=1.0), gradients)
    assert_near(found, [0.4848, 0.8746], atol=1e-4)


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
