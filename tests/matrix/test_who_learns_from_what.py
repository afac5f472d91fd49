"""Every parameter gets a gradient from the loss that should train it, and none from the other."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.learning.update import without_gradients
from tests.helpers.command_line import ROOT
from tests.helpers.matrix import (
    CROSSED,
    LEFT_OUT,
    NETWORKS,
    STACKS,
    batches,
    build,
    check_exports,
    parameters_with_gradient,
    trained,
)

pytestmark = pytest.mark.slow

WAITING = {
    # the two experts that the gate does not choose for any task, and those whose words no task has,
    # learn nothing
    "mixture_gate": ("encoder.experts",),
    "mixture_clusters": ("encoder.experts",),
    # auxiliaries alone train a context
    "mlp_context": ("encoder.context",),
}


def test_every_file_is_in_the_matrix():
    files = {
        f"{group}/{path.stem}"
        for group in ("network", "encoder")
        for path in (ROOT / "configs" / group).glob("*.yaml")
    }
    files -= LEFT_OUT.keys()
    named = {file for stack in STACKS.values() for file in stack}
    assert files == {file for file in named if not file.startswith("experiment/")}
    assert set(NETWORKS) == set(STACKS)


@pytest.mark.parametrize(
    ("network", "env"),
    [*((name, env) for name in CROSSED for env in ("toy", "metaworld")), ("mlp_context", "toy")],
)
def test_each_loss_trains_its_own_networks(command_line, monkeypatch, network, env):
    wide = [
        "--model.init_args.actor.init_args.width=32",
        "--model.init_args.critic.init_args.width=32",
    ]
    model = build(command_line, monkeypatch, env, network, *wide).model
    _, (batch, _), _ = batches(env)
    noise_RnA = torch.randn(batch.action_RnA.shape)
    model.critic_loss(batch, model.critic_target(batch, noise_RnA))[0].sum().backward()
    given = trained(model.critic, "critic.") | trained(model.encoder, "encoder.")
    got = parameters_with_gradient(model, "")
    assert got <= given, "the critic's loss trains critics and encoder alone"
    waiting = tuple(WAITING.get(network, ()))
    assert {name for name in given - got if not (waiting and name.startswith(waiting))} == set()
    model.zero_grad()
    with without_gradients(model.actor_update._frozen):
        model.actor_loss(batch, noise_RnA)[0].sum().backward()
    assert parameters_with_gradient(model, "") == trained(model.actor, "actor."), (
        "the actor's loss trains the actor alone"
    )


@pytest.mark.parametrize("network", NETWORKS)
def test_every_parameter_has_its_place_and_every_policy_is_exported(
    command_line, monkeypatch, tmp_path, network
):
    """One optimizer and one place in the gradient method; the same actions in every format."""
    model = build(command_line, monkeypatch, "toy", network).model
    optimizers = model.configure_optimizers()
    critic, actor, temperature = (
        {id(p) for g in made.param_groups for p in g["params"]} for made in optimizers
    )
    assert not critic & actor and not (critic | actor) & temperature
    for update, optimized in ((model.critic_update, critic), (model.actor_update, actor)):
        parameters = update.task_parameters
        shared, own = [{id(p) for p in part} for part in (parameters.shared, parameters.own)]
        frozen = {
            id(p)
            for p in (*model.encoder.parameters(), *model.critic.parameters())
            if not p.requires_grad
        }
        assert not shared & own and shared | own == optimized - frozen
        assert {id(p) for p in parameters.last_shared} <= shared
        assert len(parameters.shared) + len(parameters.own) == len(shared) + len(own), "none twice"
    check_exports(model, tmp_path)
