"""Gradient methods against TorchJD's implementations of the same papers, and by hand."""

from functools import partial

import pytest
import torch

from mtrl_lightning.gradients import AlignedMTL, CAGrad, FairGrad, NashMTL
from tests.helpers.gradients import assert_near, random_gradients, update
from tests.helpers.specs import spec_of

jd = pytest.importorskip("torchjd.aggregation", reason="pip install torchjd[cagrad]")

METHODS = {
    "aligned_mtl": (AlignedMTL, jd.AlignedMTL()),
    "cagrad": (partial(CAGrad, c=0.8), jd.CAGrad(c=0.8)),
    "nash_mtl": (NashMTL, jd.FairGrad(alpha=1.0)),  # the same equation
    "fairgrad 0.5": (partial(FairGrad, alpha=0.5), jd.FairGrad(alpha=0.5)),
    "fairgrad 2": (partial(FairGrad, alpha=2.0), jd.FairGrad(alpha=2.0)),
}
FACTORS = {"aligned_mtl": 1.0, "cagrad": 1.8}
"""Our updates times these have the same length, too."""


@pytest.mark.parametrize(("num_tasks", "size"), [(2, 4), (8, 3), (10, 40), (50, 80)])
@pytest.mark.parametrize("name", METHODS)
def test_update_is_that_of_torchjd(name, num_tasks, size):
    gradients = random_gradients(num_tasks, size, seed=num_tasks)
    gradients *= torch.logspace(-1, 1, num_tasks)[:, None]
    method, theirs = METHODS[name]
    found_D, expected_D = update(method(spec_of(num_tasks)), gradients), theirs(gradients)
    assert_near(found_D / found_D.norm(), expected_D / expected_D.norm(), atol=2e-4, rtol=0)
    if name in FACTORS:
        assert_near(found_D.norm() * FACTORS[name], expected_D.norm(), rtol=2e-4)


def test_parallel_gradients_and_rounding_of_aligned_mtl():
    method = AlignedMTL(spec_of(3))
    assert_near(update(method, [[1.0, 1.0], [3.0, 3.0], [0.5, 0.5]]), [1.5, 1.5])
    gradients = torch.ones(3, 5) + 1e-5 * random_gradients(3, 5)
    assert_near(update(method, gradients), torch.ones(5), atol=1e-4)


def test_cagrad_fast_treats_the_tasks_that_were_not_drawn_as_one():
    first, again = (torch.Generator().manual_seed(3) for _ in range(2))
    gradients, order = random_gradients(6), torch.randperm(6, generator=first)
    found = update(CAGrad(spec_of(6), num_sampled=2), gradients, again)
    gradients[order[2:]] = gradients[order[2:]].mean(0)
    assert_near(found, update(CAGrad(spec_of(6)), gradients), atol=1e-4)
    assert_near(update(CAGrad(spec_of(6), num_sampled=6), gradients), found, atol=1e-4)


def test_worst_task_of_cagrad_stays_where_not_all_can_improve():
    # (2, 0) and (-1, 0) allow no step in the first direction, so the dual's g_w is zero; g_0 is (1,
    # 1) / 3
    gradients = [[2.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]
    assert_near(update(CAGrad(spec_of(3), c=0.9), gradients), [0.0, 1 / 3 / 1.9], atol=1e-3)
