"""How much the entropy and each task count."""

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
from tests.helpers.algorithms import make_sac, make_spec, train

TASK_RN = torch.tensor([[0, 0], [1, 1], [2, 2]])
SPEC = make_spec(3)

# ---- the temperature ----


def test_one_temperature_follows_the_entropy_of_all_tasks():
    temperature = Temperature(SPEC, per_task=False)
    log_prob_Rn = torch.tensor([[1.0, 2.0], [-3.0, -1.0], [0.5, 2.5]])
    losses.temperature_loss(temperature(TASK_RN), log_prob_Rn, -2.0).mean().backward()
    # -(mean log prob - 2)
    assert temperature.log_alpha.grad.tolist() == pytest.approx([2 - 2 / 6])


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
