"""The scale of returns: values stay when its statistics move.

Statistics of several iterations are in ``test_ppo.py``.
"""

from functools import partial

import pytest
import torch

from mtrl_lightning.algorithms import PopArt
from mtrl_lightning.networks import MLP, MOORE, MultiHead, Separate
from mtrl_lightning.networks.network import shared_parameters
from tests.helpers.algorithms import changed, copy_of
from tests.helpers.specs import spec_of

SPEC = spec_of(3)
SIZES = {"width": 16, "depth": 2, "output_bound": 0.3}
CRITICS = {
    "multi_head": partial(MultiHead, **SIZES),
    "moore": partial(MOORE, num_experts=2, **SIZES),
    "mlp": partial(MLP, **SIZES),
    "separate": partial(Separate, **SIZES),
}
WITH_HEADS = ("multi_head", "moore")
SEEN_T = torch.full((3,), 10.0)


def make(name="multi_head", **options):
    """Return a critic and the scale of its returns."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        critic = CRITICS[name](4, 1, SPEC)
    return critic, PopArt(SPEC, critic, **options)


def full(value):
    return torch.full((3,), value)


@pytest.mark.parametrize("name", CRITICS)
def test_the_values_stay_when_the_statistics_move(name):
    critic, scale = make(name, step_size=0.3)
    generator = torch.Generator().manual_seed(1)
    x_BD, mixed_B = torch.randn(18, 4, generator=generator), torch.randperm(18, generator=generator)
    task_B = torch.arange(3).repeat_interleave(6)

    @torch.no_grad()
    def values(rows=slice(None)):
        tasks = task_B[rows]
        return scale.denormalize(scale(critic(x_BD[rows], tasks), tasks), tasks)

    assert shared_parameters(scale) == []
    before = copy_of(critic)
    # values begin at the mean of the first returns
    scale.observe(torch.tensor([0.5, -2.0, 30.0]), torch.tensor([0.5, 4.0, 100.0]), SEEN_T)
    assert changed(critic, before) == set()
    wanted_B = values()
    means = [[3.0, 40.0, -1.0], [-8.0, 41.0, 0.0], [100.0, 7.0, 30.0]]
    variances = [[9.0, 0.25, 1e3], [900.0, 0.0, 1e-3], [0.01, 1.0, 1e4]]
    for mean_T, variance_T in zip(torch.tensor(means), torch.tensor(variances), strict=True):
        old = scale.mean_T.clone(), scale.std_T.clone()
        scale.observe(mean_T, variance_T, SEEN_T)
        assert (scale.mean_T != old[0]).all() and (scale.std_T != old[1]).all()
        torch.testing.assert_close(values(), wanted_B, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(values(mixed_B), wanted_B[mixed_B], rtol=1e-5, atol=1e-4)
    # of the critic, only what follows the last shared layer
    heads = {"heads.weight", "heads.bias"} if name in WITH_HEADS else set()
    assert changed(critic, before) == heads


def test_the_variance_of_returns_far_from_zero_keeps_its_digits():
    # nu - mu^2 would be 0 in single precision
    _, scale = make()
    for _ in range(50):
        scale.observe(full(1e4), full(0.25), SEEN_T)
    assert scale.variance_T.tolist() == pytest.approx([0.25] * 3, rel=1e-5)


@pytest.mark.parametrize("name", ["multi_head", "mlp"])
def test_tasks_without_returns_stay_as_they_are(name):
    critic, scale = make(name, step_size=0.5)
    scale.observe(full(6.0), full(9.0), torch.tensor([10.0, 0.0, 10.0]))
    assert scale.mean_T.tolist() == [6, 0, 6]
    assert scale.variance_T.tolist() == pytest.approx([9, 1, 9])
    assert scale.is_known_T.tolist() == [True, False, True]
    weight_T = critic.heads.weight if name == "multi_head" else scale.weight_T
    before_T = weight_T.clone()
    scale.observe(full(8.0), full(9.0), torch.tensor([0.0, 0.0, 3.0]))
    assert scale.mean_T.tolist() == [6, 0, 7]
    assert scale.variance_T.tolist() == pytest.approx([9, 1, 10])
    assert torch.equal(weight_T[:2], before_T[:2]) and (weight_T[2] != before_T[2]).all()
    # the task that was not seen takes its first statistics as they are
    scale.observe(full(1.0), full(4.0), torch.tensor([0.0, 1.0, 0.0]))
    assert scale.mean_T.tolist() == [6, 1, 7]
    assert scale.variance_T.tolist() == pytest.approx([9, 4, 10])


def test_deviations_have_a_lower_bound():
    _, scale = make(min_std=0.5)
    scale.observe(full(1.0), torch.tensor([4.0, 9.0, 0.01]), SEEN_T)
    assert scale.std_T.tolist() == [2.0, 3.0, 0.5]
