"""The weight of the entropy: one per task, one for all, or a fixed one."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from mtrl_lightning.algorithms import FixedTemperature, Temperature, losses
from tests.helpers.algorithms import make_sac, train
from tests.helpers.specs import spec_of

TASK_RN = torch.tensor([[0, 0], [1, 1], [2, 2]])
LOG_PROB_RN = torch.tensor([[1.0, 2.0], [-3.0, -1.0], [0.5, 2.5]])
TARGET_ENTROPY = -2.0


def gradient_of(temperature):
    loss_T = losses.temperature_loss(temperature(TASK_RN), LOG_PROB_RN, TARGET_ENTROPY)
    loss_T.mean().backward()
    return temperature.log_alpha.grad.tolist()


def test_temperature_per_task_follows_the_tasks_entropy():
    # -(mean log prob of the task - 2) / 3
    assert gradient_of(Temperature(spec_of(3))) == pytest.approx([0.5 / 3, 4 / 3, 0.5 / 3])


def test_a_shared_temperature_follows_the_mean_entropy():
    # -(mean log prob of all - 2)
    assert gradient_of(Temperature(spec_of(3), per_task=False)) == pytest.approx([2 - 2 / 6])


def test_each_row_has_the_temperature_of_its_task():
    temperature = Temperature(spec_of(3))
    with torch.no_grad():
        temperature.log_alpha.copy_(torch.tensor([0.1, 0.2, 0.3]))
    assert temperature(torch.tensor([2, 0, 0, 1])).tolist() == pytest.approx([0.3, 0.1, 0.1, 0.2])
    assert temperature.values().tolist() == pytest.approx([math.exp(v) for v in (0.1, 0.2, 0.3)])


def test_fixed_temperature_weights_the_entropy_and_stays():
    sac = train(make_sac(temperature=partial(FixedTemperature, value=0.3)), 3)
    assert sac.temperature.values().tolist() == pytest.approx([0.3] * 3)
    log_alpha_Rn = sac.temperature(TASK_RN)
    assert log_alpha_Rn.shape == TASK_RN.shape
    assert log_alpha_Rn.flatten().tolist() == pytest.approx([math.log(0.3)] * 6)
    assert [update.name for update in sac.updates] == ["critic", "actor"]
    assert not [name for name in sac.drain_metrics() if "temperature" in name]
    assert not [name for name in sac.state_dict() if "temperature" in name]
