"""Aligned-MTL, CAGrad, Nash-MTL and FairGrad against TorchJD's implementations, and by hand."""

from functools import partial
from itertools import pairwise

import pytest
import torch

from mtrl_lightning.gradients import AlignedMTL, CAGrad, FairGrad, NashMTL
from tests.helpers.gradients import Problem, Quadratic, assert_near, random_gradients, update
from tests.helpers.specs import spec_of

LENGTH = (2 + 18**0.5) / 4


def combined(make, gradients, **options):
    return update(make(spec_of(len(gradients)), **options), torch.as_tensor(gradients))


# names of TorchJD's classes; our updates times the factor have the same length, too
METHODS = {
    "aligned_mtl": (AlignedMTL, "AlignedMTL", {}, 1.0),
    "cagrad": (CAGrad, "CAGrad", {"c": 0.8}, 1.8),
    "nash_mtl": (lambda spec, alpha: NashMTL(spec), "FairGrad", {"alpha": 1.0}, None),
    "fairgrad 0.5": (FairGrad, "FairGrad", {"alpha": 0.5}, None),
    "fairgrad 2": (FairGrad, "FairGrad", {"alpha": 2.0}, None),
}


@pytest.mark.parametrize(("num_tasks", "size"), [(2, 4), (8, 3), (10, 40), (50, 80)])
@pytest.mark.parametrize(("method", "name", "options", "factor"), METHODS.values(), ids=METHODS)
def test_update_is_that_of_torchjd(num_tasks, size, method, name, options, factor):
    jd = pytest.importorskip("torchjd.aggregation", reason="pip install torchjd[cagrad]")
    gradients = random_gradients(num_tasks, size, seed=num_tasks)
    gradients *= torch.logspace(-1, 1, num_tasks)[:, None]
    found_D = combined(method, gradients, **options)
    expected_D = getattr(jd, name)(**options)(gradients)
    assert_near(found_D / found_D.norm(), expected_D / expected_D.norm(), atol=2e-4, rtol=0)
    if factor is not None:
        assert_near(found_D.norm() * factor, expected_D.norm(), rtol=2e-4)


def test_parallel_gradients_and_rounding_of_aligned_mtl():
    assert_near(combined(AlignedMTL, [[1.0, 1.0], [3.0, 3.0], [0.5, 0.5]]), [1.5, 1.5])
    gradients = torch.ones(3, 5) + 1e-5 * random_gradients(3, 5)
    assert_near(combined(AlignedMTL, gradients), torch.ones(5), atol=1e-4)


def test_cagrad_fast_treats_the_tasks_that_were_not_drawn_as_one():
    first, again = (torch.Generator().manual_seed(3) for _ in range(2))
    gradients = random_gradients(6)
    order = torch.randperm(6, generator=first)
    found = update(CAGrad(spec_of(6), num_sampled=2), gradients, again)
    gradients[order[2:]] = gradients[order[2:]].mean(0)
    assert_near(found, combined(CAGrad, gradients), atol=1e-4)
    assert_near(combined(CAGrad, gradients, num_sampled=6), found, atol=1e-4)


def test_worst_task_of_cagrad_stays_where_not_all_can_improve():
    # (2, 0) and (-1, 0) allow no step in the first direction, so the dual's g_w is zero; g_0 is (1,
    # 1) / 3
    gradients = [[2.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]
    assert_near(combined(CAGrad, gradients, c=0.9), [0.0, 1 / 3 / 1.9], atol=1e-3)


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
    assert_near(combined(NashMTL, gradients), expected)


def test_the_norm_is_limited_for_shared_parameters_only():
    gradients = random_gradients(3) * 100
    free, limited = Problem(gradients), Problem(gradients)
    direction = free.update(NashMTL(spec_of(3)))
    found = limited.update(NashMTL(spec_of(3), max_norm=1.5))
    assert_near(found, direction / direction.norm() * 1.5)
    assert torch.equal(limited.own[0].grad, free.own[0].grad)
    assert_near(combined(NashMTL, gradients, max_norm=1e6), direction)
    # numbers from the authors' sequence of convex programs
    gradients = [[30.0, 0.0], [-15.0, 24.0]]
    assert_near(combined(NashMTL, gradients, max_norm=1.0), [0.4848, 0.8746], atol=1e-4)


def test_weights_are_kept_and_applied_to_new_gradients():
    problem = Quadratic(random_gradients(3))
    method = NashMTL(spec_of(3), update_every=3)
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


fair = partial(combined, FairGrad)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(0.0, [0.5, 4.0]), (0.5, [1.5, 3.0]), (1.0, [2.25, 2.25]), (2.0, [3.0, 1.5])],
)
def test_two_orthogonal_tasks_by_hand(alpha, expected):
    # w = n^(-2 alpha / (1 + alpha)) for norms n of 1 and 8, so that w n is (1, 8), (1, 2), (1, 1)
    # and (1, 1/2); the shares of the mean norm 4.5 are in proportion to them
    assert_near(fair([[1.0, 0.0], [0.0, 8.0]], alpha=alpha), expected)


@pytest.mark.parametrize("alpha", [0.5, 2.0, 5.0])
def test_gradients_that_cancel_are_a_draw_and_zero_takes_no_part(alpha):
    assert_near(fair([[2.0, 0.0], [-1.0, 0.0]], alpha=alpha), [0.0, 0.0], atol=1e-5)
    # the third gradient is orthogonal to the two that cancel, which therefore weigh far more
    found = fair([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], alpha=alpha)
    assert_near(found[0], 0.0)
    assert 0 < found[1] < 0.02
    two = [[2.0, 0.0], [1.0, 4.0]]
    assert_near(fair([*two, [0.0, 0.0]], alpha=alpha), fair(two, alpha=alpha) * 2 / 3)


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 0.5, 2.0, 1e3])
def test_equal_gradients_and_one_that_is_tiny(alpha):
    gradients = torch.tensor([0.3, -0.5]).expand(10, 2)
    assert_near(fair(gradients, alpha=alpha), gradients[0])
    found = fair(torch.cat([gradients, torch.tensor([[1e-12, 0.0]])]), alpha=alpha)
    assert torch.isfinite(found).all()
    assert found.norm() > 0.1  # the ten tasks still learn
