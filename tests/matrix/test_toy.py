"""Every network on toy tasks: who learns from what, precisions, exports, gradient methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export import ONNX, TORCH_EXPORT
from mtrl_lightning.updates.update import without_gradients
from tests.helpers.command_line import ROOT
from tests.helpers.matrix import (
    GRADIENTS,
    LEFT_OUT,
    NEEDS_SHARED,
    NETWORKS,
    OPERATIONS_OF_OTHERS,
    PRECISIONS,
    STACKS,
    batches,
    build,
    check_exports,
    check_precisions,
    check_update,
    in_precision,
    parameters_with_gradient,
    trained,
    with_gradient,
)

WAITING = {
    # the two experts that the gate does not choose for any task, and those whose words no task has,
    # learn nothing
    "mixture_top_k": ("encoder.experts",),
    "mixture_clusters": ("encoder.experts",),
    # auxiliaries alone train a context
    "mlp_context": ("encoder.context",),
}
WIDE = [
    "--model.init_args.actor.init_args.width=32",
    "--model.init_args.critic.init_args.width=32",
]
"""With fewer units, some have no gradient by chance."""
FEW = ("famo", "pcgrad")
"""With the networks whose operations others have."""


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


def check_each_loss_trains_its_own_networks(model: Any, waiting: tuple[str, ...]) -> None:
    """Every parameter has a gradient from the loss that should train it, none from the other."""
    _, (batch, _), _ = batches("toy")
    noise_RnA = torch.randn(batch.action_RnA.shape)
    model.critic_loss(batch, model.critic_target(batch, noise_RnA))[0].sum().backward()
    expected = trained(model.critic, "critic.") | trained(model.encoder, "encoder.")
    got = parameters_with_gradient(model)
    assert got <= expected
    assert not {name for name in expected - got if not (waiting and name.startswith(waiting))}
    model.zero_grad()
    with without_gradients(model.actor_update._frozen):
        model.actor_loss(batch, noise_RnA)[0].sum().backward()
    assert parameters_with_gradient(model) == trained(model.actor, "actor.")
    model.zero_grad()


def check_every_parameter_has_one_place(model: Any) -> None:
    """One optimizer and one place in the gradient method."""
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


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_network_learns_in_each_way_and_exports(command_line, monkeypatch, tmp_path, network):
    built = build(command_line, monkeypatch, "toy", network, *WIDE)  # parsing takes longest
    check_each_loss_trains_its_own_networks(built.model, WAITING.get(network, ()))
    check_every_parameter_has_one_place(built.model)
    format = TORCH_EXPORT if network in OPERATIONS_OF_OTHERS else ONNX
    check_exports(built.model, tmp_path, format)
    for gradient in FEW if network in OPERATIONS_OF_OTHERS else GRADIENTS:
        if network == "separate" and gradient in NEEDS_SHARED:
            with pytest.raises((ConfigurationError, ValueError), match="share no parameter"):
                with_gradient(built, gradient)
        else:
            check_update(with_gradient(built, gradient), "toy", gradient)
    steps = [check_update(in_precision(built, one), "toy", "mean") for one in PRECISIONS]
    check_precisions(steps)
