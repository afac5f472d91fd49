"""TD3 from its YAML files: every operation of networks with a gradient method.

``tests/export/test_policy.py`` exports its policies.
"""

from __future__ import annotations

import pytest
from torch import randn_like

from mtrl_lightning.updates.update import without_gradients
from tests.helpers.command_line import config_args
from tests.helpers.matrix import (
    PAIRS,
    batches,
    build,
    check_update,
    parameters_with_gradient,
    trained,
)

pytestmark = pytest.mark.slow

EQUAL = "--model.init_args.task_weighting=mtrl_lightning.algorithms.EqualWeights"


@pytest.mark.parametrize(("network", "gradient"), PAIRS)
def test_each_loss_trains_its_own_networks(command_line, monkeypatch, network, gradient):
    more = [*config_args(f"gradient/{gradient}"), EQUAL]
    built = build(command_line, monkeypatch, "toy", network, *more, algorithm="mttd3")
    model = built.model
    _, (batch, _), _ = batches("toy")
    target = model.critic_target(batch, randn_like(batch.action_RnA))
    model.critic_loss(batch, target)[0].sum().backward()
    assert parameters_with_gradient(model) <= trained(model.critic, "critic.") | trained(
        model.encoder, "encoder."
    ), "the critic's loss trains critics and encoder alone"
    model.zero_grad()
    with without_gradients(model.actor_update._frozen):
        model.actor_loss(batch)[0].sum().backward()
    assert parameters_with_gradient(model) <= trained(model.actor, "actor.")
    assert parameters_with_gradient(model), "the actor's loss trains the actor alone"
    model.zero_grad()
    check_update(built, "toy", gradient)
