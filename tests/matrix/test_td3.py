"""TD3 from its YAML files: every network with a gradient method, in both precisions.

What holds of SAC's networks and their export holds here, too.
"""

from __future__ import annotations

import pytest
from torch import randn_like

from mtrl_lightning.learning.update import without_gradients
from tests.helpers.command_line import config_args
from tests.helpers.matrix import (
    CROSSED,
    GRADIENTS,
    NEEDS_SHARED,
    batches,
    build,
    check_exports,
    check_updates,
    parameters_with_gradient,
    trained,
)

pytestmark = pytest.mark.slow

EQUAL = "--model.init_args.task_weighting=mtrl_lightning.algorithms.EqualWeights"
NAMES = [name for name in CROSSED if name != "brc"]  # that experiment names SAC itself
PAIRS = [
    (name, "famo" if name == "separate" else GRADIENTS[place % len(GRADIENTS)])
    for place, name in enumerate(NAMES)
]


def test_every_gradient_method_is_paired():
    assert {gradient for _, gradient in PAIRS} == set(GRADIENTS) >= set(NEEDS_SHARED)


@pytest.mark.parametrize(("network", "gradient"), PAIRS)
def test_it_updates_in_both_precisions_and_is_exported(
    command_line, monkeypatch, tmp_path, network, gradient
):
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
    check_exports(model, tmp_path)
    built = build(command_line, monkeypatch, "toy", network, *more, algorithm="mttd3")
    check_updates(built, "toy", gradient)
