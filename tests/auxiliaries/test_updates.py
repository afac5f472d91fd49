"""Which parameters each step of an update changes, in which order; what a checkpoint restores."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from mtrl_lightning.algorithms import RandomShift
from mtrl_lightning.auxiliaries import (
    HiPBMDP,
    LatentDynamics,
    Probabilistic,
    Reconstruction,
    TransitionEnsemble,
)
from mtrl_lightning.networks import MLP, MultiHead, NoConditioning
from mtrl_lightning.updates.update import Update
from tests.helpers.algorithms import (
    attach,
    changed,
    copy_of,
    make_batch,
    make_sac,
    make_spec,
    pixel_spec,
    train,
)
from tests.helpers.auxiliaries import PIXELS, PIXELS_CONTEXT, STATES, STATES_CONTEXT
from tests.helpers.checkpoints import assert_continued_is_the_same
from tests.helpers.gradients import METHODS

NETWORKS = {
    "mlp": partial(MLP, width=16, depth=1, output_bound=0.3),
    "multi_head": partial(MultiHead, width=16, depth=1, output_bound=0.3),
}
probabilistic = partial(Probabilistic, width=8)
ensemble = partial(TransitionEnsemble, size=2, width=8)
STATE_CASES = {
    "sac_ae": (STATES, [Reconstruction]),
    "sac_ae, context": (STATES_CONTEXT, [Reconstruction]),
    "deepmdp": (STATES, [partial(LatentDynamics, width=8)]),
    "deepmdp, probabilistic": (STATES, [partial(LatentDynamics, transition=probabilistic)]),
    "deepmdp, ensemble": (
        STATES,
        [partial(LatentDynamics, transition=ensemble, reward_from="next_features")],
    ),
    "hipbmdp": (STATES_CONTEXT, [partial(HiPBMDP, width=8, num_others=1)]),
    "both": (STATES_CONTEXT, [partial(HiPBMDP, width=8), Reconstruction]),
}
PIXEL_CASES = {
    "sac_ae": (PIXELS, [Reconstruction]),
    "deepmdp": (PIXELS, [partial(LatentDynamics, width=8)]),
    "hipbmdp": (PIXELS_CONTEXT, [partial(HiPBMDP, width=8)]),
    "drq": (PIXELS, []),
}
CASES = {
    **{f"states: {name}": (make_spec(), *case) for name, case in STATE_CASES.items()},
    **{f"pictures: {name}": (pixel_spec(), *case) for name, case in PIXEL_CASES.items()},
}
"""Every auxiliary with states and with images; DrQ's shift has no meaning for states."""
MATRIX = [name for name in CASES if "," not in name]
"""One of each auxiliary: its variants have the same parameters as it and other models."""

PAIRS = [
    (name, gradient, [*NETWORKS][(i + k) % len(NETWORKS)])
    for i, name in enumerate(MATRIX)
    for k, gradient in enumerate(METHODS)
]
"""Each auxiliary with each gradient method, and in turn with each network."""


def case_sac(name, network="mlp", **options):
    spec, encoder, auxiliaries = CASES[name]
    made = NETWORKS[network]
    given = {"actor": made, "critic": made, "encoder_tau": 0.05, **options}
    if name == "pictures: drq":
        given["transforms"] = [RandomShift]
    if "context" in name or "hipbmdp" in name:
        given["conditioning"] = NoConditioning  # the features contain the context
    return make_sac(spec, encoder=encoder, auxiliaries=auxiliaries, **given)


def recorded(sac, monkeypatch):
    """Make an update; return its steps in order, each with the modules that it changed."""
    steps = []

    def modules_of(before):
        parts = {name.split(".")[0]: set() for name in before}
        for name, value in sac.state_dict().items():
            if isinstance(value, torch.Tensor) and not torch.equal(value, before[name]):
                depth = 2 if name.startswith(("encoder", "actor", "auxiliaries")) else 1
                parts[name.split(".")[0]].add(".".join(name.split(".")[:depth]))
        return set().union(*parts.values())

    def record(name, call):
        before = {
            key: value.detach().clone()
            for key, value in sac.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        result = call()
        steps.append((name, modules_of(before)))
        return result

    make_step = Update.__call__
    monkeypatch.setattr(
        Update, "__call__", lambda self, *args: record(self.name, lambda: make_step(self, *args))
    )
    move = sac.targets.step
    monkeypatch.setattr(sac.targets, "step", lambda: record("targets", move))
    sac.training_step(make_batch(sac.spec), 0)
    return steps


@pytest.mark.parametrize(
    ("name", "after", "layers"),
    [
        ("states: deepmdp", "critic", ["hidden"]),
        ("states: hipbmdp", "critic", ["hidden", "context"]),
        ("states: deepmdp", "targets", ["hidden"]),  # mtrl's order
        ("pictures: sac_ae", "targets", ["convolutions"]),
    ],
)
def test_each_step_changes_its_own_modules_in_order(monkeypatch, name, after, layers):
    sac = case_sac(name)
    (auxiliary,) = sac.auxiliaries
    assert auxiliary.after == ("targets" if "sac_ae" in name else "critic"), "the default"
    auxiliary.after = after
    attach(sac)
    encoder = ["encoder.projection", *(f"encoder.{layer}" for layer in layers)]
    wanted = [
        ("critic", {"critic", *encoder[:2]}),
        ("actor", {"actor.projection", "actor.network"}),
        ("temperature", {"temperature"}),
        ("targets", {"target_critic", "target_encoder"}),
    ]
    step = type(auxiliary).__name__.lower(), {"auxiliaries.0", *encoder}
    wanted.insert(1 if after == "critic" else 4, step)
    assert recorded(sac, monkeypatch) == wanted


def test_each_parameter_is_in_the_optimizers_that_it_belongs_to():
    """The encoder is in two, the actor's projection in the actor's; the decoder's weights decay."""
    sac = case_sac("pictures: sac_ae")
    optimizers = dict(zip([u.name for u in sac.updates], sac.configure_optimizers(), strict=True))

    def owners(module: nn.Module):
        return [
            {
                (name, group["weight_decay"])
                for name, optimizer in optimizers.items()
                for group in optimizer.param_groups
                if any(parameter is own for own in group["params"])
            }
            for parameter in module.parameters()
        ]

    for module, wanted in (
        (sac.encoder, {("critic", 0), ("reconstruction", 0.0)}),
        (sac.critic, {("critic", 0)}),
        (sac.actor, {("actor", 0)}),
        (sac.auxiliaries, {("reconstruction", 1e-7)}),
        (sac.temperature, {("temperature", 0)}),
        (sac.target_encoder, set()),
    ):
        found = owners(module)
        assert found and all(one == wanted for one in found)


def test_one_adam_with_two_groups_makes_the_steps_of_two():
    sac = case_sac("states: sac_ae", critic_optimizer=partial(torch.optim.SGD, lr=0.0))
    sac.auxiliaries[0].weight_decay = 0.5
    encoder, own = [*sac.encoder.parameters()], [*sac.auxiliaries[0].parameters()]
    copies = [[p.detach().clone() for p in part] for part in (encoder, own)]
    apart = [
        torch.optim.Adam(copy, lr=1e-3, weight_decay=decay, fused=True)
        for copy, decay in zip(copies, (0.0, 0.5), strict=True)
    ]
    attach(sac)
    for i in range(3):
        sac.training_step(make_batch(sac.spec, seed=i), i)
        for optimizer, part, copy in zip(apart, (encoder, own), copies, strict=True):
            for parameter, value in zip(copy, part, strict=True):
                parameter.grad = value.grad.clone()
            optimizer.step()
    for part, copy in zip((encoder, own), copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(part, copy, strict=True))


def test_the_target_encoder_has_a_tau_of_its_own():
    sac = case_sac("states: deepmdp", tau=0.25, encoder_tau=0.5)
    attach(sac)
    before = [copy_of(module) for module in (sac.target_critic, sac.target_encoder)]
    sac.update(make_batch(sac.spec))
    parts = zip((sac.critic, sac.encoder), (sac.target_critic, sac.target_encoder), strict=True)
    for (source, target), old, tau in zip(parts, before, (0.25, 0.5), strict=True):
        sources = dict(source.named_parameters())
        for name, value in target.named_parameters():
            expected = old[name] + tau * (sources[name].detach() - old[name])
            torch.testing.assert_close(value, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gradient", "network"), PAIRS)
def test_every_auxiliary_goes_with_every_gradient_method(name, network, gradient):
    """No pair is left out."""
    method = METHODS[gradient]
    sac = case_sac(name, network, actor_gradient=method, critic_gradient=method)
    before = copy_of(sac)
    train(sac, 2)
    metrics = sac.drain_metrics()
    assert all(torch.isfinite(torch.tensor(list(metrics.values()))))
    moved = changed(sac, before)
    trained = {
        key
        for key, parameter in sac.named_parameters()
        if key.startswith(("encoder", "actor", "critic", "auxiliaries"))
    }
    assert {key.split(".")[0] for key in moved} >= {key.split(".")[0] for key in trained}
    for auxiliary in sac.auxiliaries:
        assert f"train/{type(auxiliary).__name__.lower()}_loss" in metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_restored_run_is_the_same_run(name, tmp_path):
    make = partial(case_sac, name, tau=0.1, actor_every=2)
    assert_continued_is_the_same(make, tmp_path, half=2)


def test_reset_clears_the_encoders_moments_and_keeps_auxiliaries():
    sac = train(case_sac("states: deepmdp"), 2)
    (auxiliary,) = sac.auxiliaries
    optimizer = sac.auxiliary_updates[0].optimizer
    own = {p: optimizer.state[p]["exp_avg"].clone() for p in auxiliary.parameters()}
    sac.reset_networks()
    was_reset = {*sac.encoder.parameters(), *sac.critic.parameters(), *sac.actor.parameters()}
    kept = [p for update in sac.updates for p in update.optimizer.state if p in was_reset]
    assert kept == []
    assert own and optimizer.state.keys() == own.keys()
    assert all(torch.equal(optimizer.state[p]["exp_avg"], before) for p, before in own.items())
    temperature = sac.temperature.log_alpha
    assert temperature in sac.temperature_update.optimizer.state
    train(sac, 1)
    assert {optimizer.state[p]["step"].item() for p in sac.encoder.parameters()} == {1}
    assert {optimizer.state[p]["step"].item() for p in auxiliary.parameters()} == {3}


def test_an_untrained_task_has_the_context_of_the_mean_embedding():
    spec = make_spec(4, train_tasks=[0, 2, 3])
    sac = make_sac(
        spec,
        encoder=STATES_CONTEXT,
        auxiliaries=[partial(HiPBMDP, width=8)],
        conditioning=NoConditioning,
        actor=NETWORKS["mlp"],
        critic=NETWORKS["mlp"],
    )
    train(sac, 2)
    task_T = torch.arange(4)
    context_TC = sac.encoder.context(task_T)
    sac.untrained.fill(sac.acting_modules())
    found_TC = sac.encoder.context(task_T)
    embedding_TC = sac.encoder.context.embedding.weight_TC
    assert torch.equal(embedding_TC[1], embedding_TC[[0, 2, 3]].mean(0))
    assert torch.equal(found_TC[[0, 2, 3]], context_TC[[0, 2, 3]])
    assert not torch.allclose(found_TC[1], context_TC[1])
