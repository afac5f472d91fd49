"""Gradient methods against TorchJD's implementations of the same papers."""

import pytest
import torch

from mtrl_lightning.gradients import AlignedMTL, CAGrad, FairGrad, NashMTL, PCGrad
from tests.helpers.gradients import assert_near, random_gradients, update
from tests.helpers.specs import spec_of

jd = pytest.importorskip("torchjd.aggregation", reason="pip install torchjd[cagrad]")
every_size = pytest.mark.parametrize("num_tasks", [2, 10])


@every_size
def test_cagrad_and_aligned_mtl_are_the_same(num_tasks):
    gradients, spec = random_gradients(num_tasks, 12), spec_of(num_tasks)
    expected_D = jd.CAGrad(c=0.5)(gradients) / 1.5  # ours is divided by 1 + c
    assert_near(update(CAGrad(spec, c=0.5), gradients), expected_D, atol=1e-4, rtol=1e-3)
    expected_D = jd.AlignedMTL()(gradients)
    assert_near(update(AlignedMTL(spec), gradients), expected_D, atol=1e-5, rtol=1e-3)


@every_size
@pytest.mark.parametrize("method", [FairGrad, NashMTL])
@pytest.mark.filterwarnings("ignore")
def test_fairgrad_and_nash_mtl_have_the_same_direction(method, num_tasks):
    gradients = random_gradients(num_tasks, 12)
    if method is NashMTL:
        pytest.importorskip("ecos", reason="TorchJD's Nash-MTL needs it")
        expected_D = jd.NashMTL(n_tasks=num_tasks)(gradients)
        found_D = update(NashMTL(spec_of(num_tasks)), gradients)
    else:
        expected_D = jd.FairGrad(alpha=1.0)(gradients)
        found_D = update(FairGrad(spec_of(num_tasks), alpha=1.0), gradients)
    assert_near(found_D / found_D.norm(), expected_D / expected_D.norm(), atol=2e-3, rtol=0)


def test_pcgrad_is_the_mean_of_the_projected_gradients():
    gradients = torch.tensor([[1.0, 0.2, 0.0], [-1.0, 0.5, 0.3]])
    assert_near(update(PCGrad(spec_of(2)), gradients), jd.PCGrad()(gradients) / 2)
