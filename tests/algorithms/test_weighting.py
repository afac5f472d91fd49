"""How much each task counts."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.optim import SGD

from mtrl_lightning.algorithms import (
    FixedTemperature,
    ManualWeights,
    Temperature,
    TemperatureWeights,
)
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.algorithms import attach, make_batch, make_sac, make_spec


def test_temperature_weights_are_a_softmax_by_hand():
    log_alpha = [math.log(1.0), math.log(0.5), math.log(0.25)]
    # exp(-log alpha) is 1, 2 and 4: shares 1/7, 2/7, 4/7 of three tasks
    weights = TemperatureWeights(make_spec(3))(torch.tensor(log_alpha, requires_grad=True))
    assert weights.tolist() == pytest.approx([3 / 7, 6 / 7, 12 / 7], rel=1e-5)
    assert not weights.requires_grad


def test_manual_weights_sum_to_the_number_of_tasks():
    assert ManualWeights(make_spec(3), {"task-1": 4.0})(torch.zeros(3)).tolist() == pytest.approx(
        [0.5, 2.0, 0.5]
    )
    trained = make_spec(3, train_tasks=(0, 2))
    assert ManualWeights(trained, {"task-2": 3.0})(torch.zeros(2)).tolist() == pytest.approx(
        [0.5, 1.5]
    )


@pytest.mark.parametrize("temperature", [FixedTemperature, partial(Temperature, per_task=False)])
def test_temperature_weights_need_learned_temperatures_per_task(temperature):
    with pytest.raises(ConfigurationError):
        make_sac(task_weighting=TemperatureWeights, temperature=temperature)


def test_weights_scale_gradients_and_not_the_logged_loss():
    """A task of weight 0 has no effect: the result is that of the other task, counted twice."""
    spec, alone = make_spec(2), make_spec(2, train_tasks=(0,))
    still = partial(SGD, lr=0.1)
    options = {"critic_optimizer": still, "actor_optimizer": still, "actor_max_grad_norm": None}
    weighted = make_sac(
        spec,
        task_weighting=lambda s: ManualWeights(s, {"task-1": 0.0}),
        critic_max_grad_norm=None,
        **options,
    )
    plain = make_sac(alone, critic_max_grad_norm=None, **options)
    batch = make_batch(spec, rows=4)
    first = type(batch)(*(field[:1] for field in batch[:-1]))
    for sac, given in ((weighted, batch), (plain, first)):
        attach(sac)
        sac.generators.normal_like = lambda _, action_RnA: torch.ones_like(action_RnA)
        sac.training_step(given, 0)
    for a, b in zip(weighted.actor.parameters(), plain.actor.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(weighted.critic.parameters(), plain.critic.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert (
        weighted.drain_metrics()["train/critic_loss"] != plain.drain_metrics()["train/critic_loss"]
    )
