"""The weight of the entropy: one a task, or one for all."""

from __future__ import annotations

import math

import pytest
import torch

from mtrl_lightning.algorithms import Temperature, losses
from mtrl_lightning.errors import ConfigurationError

TASK_B = torch.tensor([0, 0, 1, 1, 2, 2])
LOG_PROB_B = torch.tensor([1.0, 2.0, -3.0, -1.0, 0.5, 2.5])
TARGET_ENTROPY = -2.0


def gradient_of(temperature):
    loss_T = losses.temperature_loss(temperature(TASK_B), LOG_PROB_B, TARGET_ENTROPY, 3)
    loss_T.mean().backward()
    return temperature.log_alpha.grad.tolist()


def test_with_one_temperature_a_task_each_follows_its_own_entropy():
    # -(mean log prob of the task - 2) / 3
    assert gradient_of(Temperature(3)) == pytest.approx([0.5 / 3, 4 / 3, 0.5 / 3])


def test_a_shared_temperature_follows_the_mean_entropy():
    # -(mean log prob of all - 2)
    assert gradient_of(Temperature(3, per_task=False)) == pytest.approx([2 - 2 / 6])


@pytest.mark.parametrize(("per_task", "size"), [(True, 4), (False, 1)])
@pytest.mark.parametrize("initial", [1.0, 0.1, 2.5])
def test_it_begins_at_the_value_asked_for(per_task, size, initial):
    temperature = Temperature(4, initial=initial, per_task=per_task)
    assert temperature.log_alpha.shape == (size,)
    assert temperature.values().tolist() == pytest.approx([initial] * 4)
    assert temperature(torch.tensor([3, 0])).tolist() == pytest.approx([math.log(initial)] * 2)


def test_each_row_has_the_temperature_of_its_task():
    temperature = Temperature(3)
    with torch.no_grad():
        temperature.log_alpha.copy_(torch.tensor([0.1, 0.2, 0.3]))
    assert temperature(torch.tensor([2, 0, 0, 1])).tolist() == pytest.approx([0.3, 0.1, 0.1, 0.2])
    assert temperature.values().tolist() == pytest.approx([math.exp(v) for v in (0.1, 0.2, 0.3)])


def test_the_values_are_for_reading():
    assert not Temperature(3).values().requires_grad


@pytest.mark.parametrize("initial", [0.0, -1.0, float("nan")])
def test_a_value_that_is_not_above_zero_is_refused(initial):
    with pytest.raises(ConfigurationError, match="initial temperature"):
        Temperature(3, initial=initial)


@pytest.mark.parametrize("per_task", [True, False])
def test_it_is_restored(per_task):
    before = Temperature(3, per_task=per_task)
    after = Temperature(3, initial=7.0, per_task=per_task)
    with torch.no_grad():
        before.log_alpha.add_(torch.arange(len(before.log_alpha)) + 0.5)
    after.load_state_dict(before.state_dict())
    assert torch.equal(after.values(), before.values())
