"""Every parameter gets a gradient from the loss that should train it, and none from the other."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.export import policy as exporting
from mtrl_lightning.export.names import ONNX, POLICY_FILES
from mtrl_lightning.learning.update import without_gradients
from mtrl_lightning.loading import LoadedPolicy
from tests.conftest import ROOT
from tests.matrix import CROSSED, LEFT_OUT, NETWORKS, STACKS, batches, build

WAITING = {
    # the two experts that the gate does not choose for any task, and those whose words no task has,
    # learn nothing
    "mixture_gate": ("encoder.experts",),
    "mixture_clusters": ("encoder.experts",),
    # auxiliaries alone train a context
    "mlp_context": ("encoder.context",),
}


def with_gradient(module, prefix=""):
    return {
        prefix + name
        for name, p in module.named_parameters()
        if p.grad is not None and p.grad.any()
    }


def trained(module, prefix=""):
    return {prefix + name for name, p in module.named_parameters() if p.requires_grad}


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
    got = with_gradient(model, "")
    assert got <= given, "the critic's loss trains critics and encoder alone"
    waiting = tuple(WAITING.get(network, ()))
    assert {name for name in given - got if not (waiting and name.startswith(waiting))} == set()
    model.zero_grad()
    with without_gradients(model.actor_update._frozen):
        model.actor_loss(batch, noise_RnA)[0].sum().backward()
    assert with_gradient(model, "") == trained(model.actor, "actor."), (
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


def check_exports(model, folder):
    """Compare the actions of the exported policy, whose weights are large enough to matter."""
    generator = torch.Generator().manual_seed(0)
    for module in model.acting_modules().values():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    policy = LoadedPolicy(model)
    observation_ED, task_E = exporting.observations_of(model.spec, 40)
    assert policy.act(observation_ED, task_E).std(0).max() > 0.005
    program = exporting.capture(policy)
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    # the file of torch.export holds the program itself, and is tested once
    file = folder / POLICY_FILES[ONNX]
    exporting.write(program, ONNX, file)
    exported = exporting.load_exported(file, ONNX)
    comparison = exporting.compare(policy, exported, num_observations=40)
    assert comparison.max_difference <= exporting.TOLERANCE
