"""The scale of returns: its statistics, and that values stay when they move."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import PopArt, ReturnScale
from mtrl_lightning.networks import MLP, MOORE, MultiHead, PaCo, Separate
from mtrl_lightning.networks.task_axes import shared_parameters
from tests.helpers.algorithms import changed, copy_of
from tests.helpers.specs import spec_of

NUM_TASKS, OBS_DIM, ROWS = 3, 4, 6
SIZES = {"width": 16, "depth": 2, "output_bound": 0.3}
CRITICS = {
    "multi_head": partial(MultiHead, **SIZES),
    "moore": partial(MOORE, num_experts=2, **SIZES),
    "mlp": partial(MLP, **SIZES),
    "mlp with LayerNorm": partial(MLP, layer_norm=True, **SIZES),
    "heads with a hidden layer": partial(MultiHead, head_width=8, **SIZES),
    "paco": partial(PaCo, num_sets=2, **SIZES),
    "separate": partial(Separate, **SIZES),
}
WITH_HEADS = ("multi_head", "moore")
TASK_B = torch.arange(NUM_TASKS).repeat_interleave(ROWS)
SEEN_T = torch.full((NUM_TASKS,), 10.0)


def make_critic(name="multi_head", seed=0, num_tasks=NUM_TASKS):
    torch.manual_seed(seed)
    return CRITICS[name](OBS_DIM, 1, spec_of(num_tasks))


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(1)
    return lambda *shape: torch.randn(shape, generator=generator)


def values_of(scale, critic, x_BD, task_B=TASK_B):
    with torch.no_grad():
        return scale.denormalize(scale(critic(x_BD, task_B), task_B), task_B)


def test_a_network_of_ones_own_scales_its_outputs():
    class Declared(MLP):
        def scale_outputs(self, scale_T, shift_T):
            self.received = scale_T, shift_T

    critic = Declared(OBS_DIM, 1, spec_of(NUM_TASKS))
    scale = PopArt(spec_of(NUM_TASKS), critic)
    scale.observe(torch.zeros(3), torch.ones(3), SEEN_T)
    assert scale.weight_T is None and len(critic.received) == 2


# ---- the values stay ----


@pytest.mark.parametrize("name", CRITICS)
def test_the_values_stay_when_the_statistics_move(draw, name):
    critic = make_critic(name)
    scale = PopArt(spec_of(NUM_TASKS), critic, step_size=0.3)
    x_BD = draw(NUM_TASKS * ROWS, OBS_DIM)
    mixed_B = torch.randperm(NUM_TASKS * ROWS, generator=torch.Generator().manual_seed(0))
    scale.observe(torch.tensor([0.5, -2.0, 30.0]), torch.tensor([0.5, 4.0, 100.0]), SEEN_T)
    wanted_B = values_of(scale, critic, x_BD)
    means = [[3.0, 40.0, -1.0], [-8.0, 41.0, 0.0], [100.0, 7.0, 30.0]]
    variances = [[9.0, 0.25, 1e3], [900.0, 0.0, 1e-3], [0.01, 1.0, 1e4]]
    for mean_T, variance_T in zip(torch.tensor(means), torch.tensor(variances), strict=True):
        before = scale.mean_T.clone(), scale.std_T.clone()
        scale.observe(mean_T, variance_T, SEEN_T)
        assert (scale.mean_T != before[0]).all()
        assert (scale.std_T != before[1]).all()
        torch.testing.assert_close(values_of(scale, critic, x_BD), wanted_B, rtol=1e-5, atol=1e-4)
        found_B = values_of(scale, critic, x_BD[mixed_B], TASK_B[mixed_B])
        torch.testing.assert_close(found_B, wanted_B[mixed_B], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CRITICS)
def test_only_what_follows_the_last_shared_layer_is_rescaled(name):
    critic = make_critic(name)
    scale = PopArt(spec_of(NUM_TASKS), critic)
    assert (scale.weight_T is None) == (scale.bias_T is None) == (name in WITH_HEADS)
    scale.observe(torch.zeros(3), torch.ones(3), SEEN_T)
    before = copy_of(critic)
    scale.observe(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0]), SEEN_T)
    wanted = {"heads.weight", "heads.bias"} if name in WITH_HEADS else set()
    assert changed(critic, before) == wanted
    assert shared_parameters(scale) == []


def test_the_heads_by_hand():
    critic = make_critic()
    with torch.no_grad():
        critic.heads.weight.fill_(2.0)
        critic.heads.bias.fill_(1.0)
    scale = PopArt(spec_of(NUM_TASKS), critic, step_size=0.5)
    # tasks 0 and 1 have the mean 1 and the variance 4; task 2 is not known
    scale.observe(torch.ones(3), torch.full((3,), 4.0), torch.tensor([5.0, 5.0, 0.0]))
    # task 0: mean 1 + 0.5 * 4, variance 4 + 0.5 (56 - 4) + 0.25 * 4^2 = 34; task 1 as before
    scale.observe(torch.tensor([5.0, 1.0, 7.0]), torch.tensor([56.0, 4.0, 9.0]), SEEN_T)
    assert scale.mean_T.tolist() == pytest.approx([3, 1, 7])
    assert scale.variance_T.tolist() == pytest.approx([34, 4, 9])
    # the value 2 n + 1 is n' sqrt(34) + 3: weights by 2 / sqrt(34), and the bias is shifted
    std = math.sqrt(34)
    assert critic.heads.weight[0].tolist() == pytest.approx([2 * 2 / std] * 16, rel=1e-6)
    assert critic.heads.bias.tolist() == pytest.approx([(2 * 1 + 1 - 3) / std, 1, 1], abs=1e-6)
    assert torch.equal(critic.heads.weight[1:], torch.full((2, 16), 2.0))


# ---- the statistics ----


@pytest.mark.parametrize("step_size", [0.05, 0.3, 1.0])
def test_statistics_are_moving_averages_of_two_moments(step_size):
    generator = np.random.default_rng(0)
    scale = PopArt(spec_of(NUM_TASKS), make_critic(), step_size=step_size)
    mu_T = nu_T = None
    for _ in range(30):
        mean_T = generator.normal(size=NUM_TASKS) * 5
        variance_T = generator.exponential(size=NUM_TASKS) * 3
        scale.observe(
            torch.tensor(mean_T, dtype=torch.float32),
            torch.tensor(variance_T, dtype=torch.float32),
            SEEN_T,
        )
        # equation 6 of van Hasselt et al. 2016, with the mean of a whole iteration's targets
        second_T = variance_T + mean_T**2
        mu_T = mean_T if mu_T is None else (1 - step_size) * mu_T + step_size * mean_T
        nu_T = second_T if nu_T is None else (1 - step_size) * nu_T + step_size * second_T
        assert scale.mean_T.tolist() == pytest.approx(mu_T, rel=1e-5, abs=1e-5)
        assert scale.variance_T.tolist() == pytest.approx(nu_T - mu_T**2, rel=1e-5, abs=2e-5)
        assert scale.std_T.tolist() == pytest.approx(np.sqrt(nu_T - mu_T**2), rel=1e-3)


def test_the_variance_of_returns_far_from_zero_keeps_its_digits():
    # nu - mu^2 would be 0 in single precision
    scale = PopArt(spec_of(NUM_TASKS), make_critic())
    for _ in range(50):
        scale.observe(torch.full((3,), 1e4), torch.full((3,), 0.25), SEEN_T)
    assert scale.variance_T.tolist() == pytest.approx([0.25] * 3, rel=1e-5)


@pytest.mark.parametrize("name", ["multi_head", "mlp"])
def test_tasks_without_returns_stay_as_they_are(draw, name):
    critic = make_critic(name)
    scale = PopArt(spec_of(NUM_TASKS), critic, step_size=0.5)
    x_BD = draw(NUM_TASKS * ROWS, OBS_DIM)
    some_T = torch.tensor([10.0, 0.0, 10.0])
    scale.observe(torch.full((3,), 6.0), torch.full((3,), 9.0), some_T)
    assert scale.mean_T.tolist() == [6, 0, 6]
    assert scale.variance_T.tolist() == pytest.approx([9, 1, 9])
    assert scale.is_known_T.tolist() == [True, False, True]
    before_B = critic(x_BD, TASK_B)
    scale.observe(torch.full((3,), 8.0), torch.full((3,), 9.0), torch.tensor([0.0, 0.0, 3.0]))
    assert scale.mean_T.tolist() == [6, 0, 7]
    assert scale.variance_T.tolist() == pytest.approx([9, 1, 10])
    if name == "multi_head":
        is_other_B = TASK_B != 2
        assert torch.equal(critic(x_BD, TASK_B)[is_other_B], before_B[is_other_B])
    else:
        assert scale.weight_T[:2].tolist() == [1, 1]
        assert scale.bias_T[:2].tolist() == [0, 0]
    # the task that was not seen takes its first statistics as they are
    scale.observe(torch.full((3,), 1.0), torch.full((3,), 4.0), torch.tensor([0.0, 1.0, 0.0]))
    assert scale.mean_T.tolist() == [6, 1, 7]
    assert scale.variance_T.tolist() == pytest.approx([9, 4, 10])


# ---- normalized and unnormalized values ----


def test_normalized_values_by_hand():
    scale = PopArt(spec_of(NUM_TASKS), make_critic(), min_std=0.125)
    scale.observe(torch.full((3,), 2.0), torch.zeros(3), SEEN_T)
    assert scale.normalize(torch.tensor([2.25]), torch.tensor([1])).item() == 2, "the smallest"
    scale = PopArt(spec_of(NUM_TASKS), make_critic())
    scale.observe(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 9.0, 0.25]), SEEN_T)
    task_B = torch.tensor([2, 0, 1])
    value_B = torch.tensor([4.0, 4.0, 4.0])
    assert scale.normalize(value_B, task_B).tolist() == pytest.approx([2, 1.5, 2 / 3])
    assert scale.denormalize(value_B, task_B).tolist() == pytest.approx([5, 9, 14])


def test_the_plain_scale_leaves_everything_as_it_is(draw):
    critic = make_critic()
    scale = ReturnScale(spec_of(NUM_TASKS), critic)
    before = copy_of(critic)
    scale.observe(torch.full((3,), 5.0), torch.full((3,), 9.0), SEEN_T)
    assert changed(critic, before) == set()
    assert list(scale.state_dict()) == []
    x_BD = draw(NUM_TASKS * ROWS, OBS_DIM)
    value_B = scale(critic(x_BD, TASK_B), TASK_B)
    assert torch.equal(value_B, critic(x_BD, TASK_B)[:, 0])
    assert scale.normalize(value_B, TASK_B) is scale.denormalize(value_B, TASK_B) is value_B
