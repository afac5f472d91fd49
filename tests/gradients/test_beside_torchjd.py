"""Gradient methods beside TorchJD's implementations of the same papers."""

import pytest
import torch

from mtrl_lightning.gradients import AlignedMTL, CAGrad, FairGrad, NashMTL, PCGrad
from tests.helpers.gradients import assert_near, random_gradients, update
from tests.helpers.specs import spec_of

jd = pytest.importorskip("torchjd.aggregation", reason="pip install torchjd[cagrad]")
every_size = pytest.mark.parametrize("num_tasks", [2, 10])


def assert_same_direction(found_D, expected_D):
    assert_near(found_D / found_D.norm(), expected_D / expected_D.norm(), atol=2e-3, rtol=0)


@every_size
def test_cagrad_is_the_papers_before_the_division_by_one_plus_c(num_tasks):
    gradients = random_gradients(num_tasks, 12)
    expected_D = jd.CAGrad(c=0.5)(gradients) / 1.5
    assert_near(
        update(CAGrad(spec_of(num_tasks), c=0.5), gradients), expected_D, atol=1e-4, rtol=1e-3
    )


@every_size
def test_aligned_mtl(num_tasks):
    gradients = random_gradients(num_tasks, 12)
    expected_D = jd.AlignedMTL()(gradients)
    assert_near(update(AlignedMTL(spec_of(num_tasks)), gradients), expected_D, atol=1e-5, rtol=1e-3)


@every_size
def test_fairgrad_has_the_same_direction(num_tasks):
    gradients = random_gradients(num_tasks, 12)
    expected_D = jd.FairGrad(alpha=1.0)(gradients)
    assert_same_direction(update(FairGrad(spec_of(num_tasks), alpha=1.0), gradients), expected_D)


@every_size
@pytest.mark.filterwarnings("ignore")
def test_nash_mtl_has_the_same_direction(num_tasks):
    pytest.importorskip("ecos", reason="TorchJD's Nash-MTL needs it")
    gradients = random_gradients(num_tasks, 12)
    expected_D = jd.NashMTL(n_tasks=num_tasks)(gradients)
    assert_same_direction(update(NashMTL(spec_of(num_tasks)), gradients), expected_D)


def test_pcgrad_is_the_mean_of_the_projected_gradients():
    gradients = torch.tensor([[1.0, 0.2, 0.0], [-1.0, 0.5, 0.3]])
    assert_near(update(PCGrad(spec_of(2)), gradients), jd.PCGrad()(gradients) / 2)
