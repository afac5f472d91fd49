"""How much the entropy and each task count."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from mtrl_lightning.algorithms import (
    FixedTemperature,
    ManualWeights,
    Temperature,
    TemperatureWeights,
    losses,
)
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import MultiHead
from tests.helpers.algorithms import copy_of, make_sac, make_spec, train

TASK_RN = torch.tensor([[0, 0], [1, 1], [2, 2]])
SPEC = make_spec(3)

# ---- the temperature ----


@pytest.mark.parametrize(
    ("per_task", "wanted"),
    [
        (True, [0.5 / 3, 4 / 3, 0.5 / 3]),  # -(mean log prob of the task - 2) / 3
        (False, [2 - 2 / 6]),  # -(mean log prob of all - 2)
    ],
)
def test_temperatures_follow_the_entropy_of_their_tasks(per_task, wanted):
    temperature = Temperature(SPEC, per_task=per_task)
    log_prob_Rn = torch.tensor([[1.0, 2.0], [-3.0, -1.0], [0.5, 2.5]])
    losses.temperature_loss(temperature(TASK_RN), log_prob_Rn, -2.0).mean().backward()
    assert temperature.log_alpha.grad.tolist() == pytest.approx(wanted)


def test_fixed_temperature_weights_the_entropy_and_stays():
    sac = train(make_sac(temperature=partial(FixedTemperature, value=0.3)), 3)
    assert sac.temperature.values().tolist() == pytest.approx([0.3] * 3)
    log_alpha_Rn = sac.temperature(TASK_RN)
    torch.testing.assert_close(log_alpha_Rn, torch.full((3, 2), math.log(0.3)))
    assert [update.name for update in sac.updates] == ["critic", "actor"]
    assert not [name for name in (*sac.drain_metrics(), *sac.state_dict()) if "temperat" in name]


# ---- the tasks ----


def test_temperature_weights_are_a_softmax_by_hand():
    log_alpha_R = torch.tensor([1.0, 0.5, 0.25]).log().requires_grad_()
    weight_R = TemperatureWeights(SPEC)(log_alpha_R)
    # exp(-log alpha) is 1, 2 and 4: shares 1/7, 2/7, 4/7 of three tasks
    assert weight_R.tolist() == pytest.approx([3 / 7, 6 / 7, 12 / 7], rel=1e-5)
    assert not weight_R.requires_grad


@pytest.mark.parametrize("temperature", [FixedTemperature, partial(Temperature, per_task=False)])
def test_temperature_weights_need_learned_temperatures_per_task(temperature):
    with pytest.raises(ConfigurationError):
        make_sac(task_weighting=TemperatureWeights, temperature=temperature)


@pytest.mark.parametrize(
    ("trained", "weights", "wanted"),
    [((0, 1, 2), {"task-1": 4.0}, [0.5, 2.0, 0.5]), ((0, 2), {"task-2": 3.0}, [0.5, 1.5])],
)
def test_manual_weights_sum_to_the_number_of_tasks(trained, weights, wanted):
    weighting = ManualWeights(make_spec(3, train_tasks=trained), weights)
    assert weighting(torch.zeros(len(trained))).tolist() == pytest.approx(wanted)


def test_a_task_of_weight_0_trains_neither_actor_nor_critics():
    heads = partial(MultiHead, width=16, depth=1)
    weights = partial(ManualWeights, weights={"task-1": 0.0})
    sac = make_sac(make_spec(2), actor=heads, critic=heads, task_weighting=weights)
    networks = [sac.actor, *sac.critic.members]
    before = [copy_of(network.heads)["weight"] for network in networks]
    train(sac, 1)
    for network, weight in zip(networks, before, strict=True):
        moved_T = (network.heads.weight != weight).unflatten(0, (2, -1)).flatten(1).any(1)
        assert moved_T.tolist() == [True, False]
