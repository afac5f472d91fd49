"""Which parameters each step of an update changes, in which order; what a checkpoint restores."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mtrl_lightning.algorithms import RandomShift
from mtrl_lightning.auxiliaries import (
    HiPBMDP,
    LatentDynamics,
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

NETWORKS = {kind: partial(kind, width=16, depth=1, output_bound=0.3) for kind in (MLP, MultiHead)}
ENSEMBLE = partial(TransitionEnsemble, size=2, width=8)
CASES = {
    "states: sac_ae": (STATES, [Reconstruction]),
    "states: deepmdp": (STATES, [partial(LatentDynamics, width=8)]),
    "states: ensemble": (
        STATES_CONTEXT,
        [partial(LatentDynamics, transition=ENSEMBLE, reward_from="next_features")],
    ),
    "states: hipbmdp": (STATES_CONTEXT, [partial(HiPBMDP, width=8, num_others=1)]),
    "states: both": (STATES_CONTEXT, [partial(HiPBMDP, width=8), Reconstruction]),
    "pictures: sac_ae": (PIXELS, [Reconstruction]),
    "pictures: hipbmdp": (PIXELS_CONTEXT, [partial(HiPBMDP, width=8)]),
    "pictures: drq": (PIXELS, []),
}
"""Every auxiliary with states and with images; DrQ's shift has no meaning for states."""
PAIRS = [
    (name, gradient, [*NETWORKS][i % 2])
    for i, (name, gradient) in enumerate(zip([*CASES, *CASES], METHODS, strict=False))
]
"""Each gradient method with an auxiliary, and each auxiliary with a gradient method."""


def case_sac(name, network=MLP, **options):
    encoder, auxiliaries = CASES[name]
    made = NETWORKS[network]
    given = {"actor": made, "critic": made, "encoder_tau": 0.05, **options}
    if name == "pictures: drq":
        given["transforms"] = [RandomShift]
    if encoder in (STATES_CONTEXT, PIXELS_CONTEXT):
        given["conditioning"] = NoConditioning  # the features contain the context
    spec = pixel_spec() if "pictures" in name else make_spec()
    return make_sac(spec, encoder=encoder, auxiliaries=auxiliaries, **given)


def tensors_of(sac):
    state = sac.state_dict()
    return {key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)}


def recorded(sac, monkeypatch):
    """Make an update; return its steps in order, each with the modules that it changed."""
    steps = []

    def module_of(name):
        is_divided = name.startswith(("encoder", "actor", "auxiliaries"))
        return ".".join(name.split(".")[: 2 if is_divided else 1])

    def record(name, call):
        before = tensors_of(sac)
        result = call()
        after = tensors_of(sac).items()
        moved = {module_of(key) for key, value in after if not torch.equal(value, before[key])}
        steps.append((name, moved))
        return result

    make_step, move = Update.__call__, sac.targets.step
    monkeypatch.setattr(
        Update, "__call__", lambda self, *args: record(self.name, lambda: make_step(self, *args))
    )
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

    def owners(parameter):
        return {
            (name, group["weight_decay"])
            for name, optimizer in optimizers.items()
            for group in optimizer.param_groups
            if any(parameter is own for own in group["params"])
        }

    for module, wanted in (
        (sac.encoder, {("critic", 0), ("reconstruction", 0.0)}),
        (sac.critic, {("critic", 0)}),
        (sac.actor, {("actor", 0)}),
        (sac.auxiliaries, {("reconstruction", 1e-7)}),
        (sac.temperature, {("temperature", 0)}),
        (sac.target_encoder, set()),
    ):
        found = [owners(parameter) for parameter in module.parameters()]
        assert found and all(one == wanted for one in found)


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


@pytest.mark.parametrize(("name", "gradient", "network"), PAIRS)
def test_auxiliaries_go_with_gradient_methods(name, network, gradient):
    method = METHODS[gradient]
    sac = case_sac(name, network, actor_gradient=method, critic_gradient=method)
    before = copy_of(sac)
    train(sac, 2)
    metrics = sac.drain_metrics()
    assert all(torch.isfinite(torch.tensor(list(metrics.values()))))
    trained = {key.split(".")[0] for key, _ in sac.named_parameters() if "target" not in key}
    assert {key.split(".")[0] for key in changed(sac, before)} >= trained
    for auxiliary in sac.auxiliaries:
        assert f"train/{type(auxiliary).__name__.lower()}_loss" in metrics


@pytest.mark.parametrize(
    "name", ["states: ensemble", "states: hipbmdp", "pictures: sac_ae", "pictures: drq"]
)
def test_a_restored_run_is_the_same_run(name, tmp_path):
    make = partial(case_sac, name, tau=0.1, actor_every=2)
    assert_continued_is_the_same(make, tmp_path, half=2)


def test_reset_clears_the_encoders_moments_and_keeps_auxiliaries():
    sac = train(case_sac("states: deepmdp"), 2)
    (auxiliary,), (update,) = sac.auxiliaries, sac.auxiliary_updates
    before = copy_of(auxiliary)
    sac.reset_networks()
    assert not changed(auxiliary, before)
    train(sac, 1)
    steps = {parameter: int(state["step"]) for parameter, state in update.optimizer.state.items()}
    assert {steps[parameter] for parameter in sac.encoder.parameters()} == {1}
    assert {steps[parameter] for parameter in auxiliary.parameters()} == {3}
    of_temperature = sac.temperature_update.optimizer.state[sac.temperature.log_alpha]
    assert of_temperature["step"] == 3


def test_an_untrained_task_has_the_context_of_the_mean_embedding():
    spec = make_spec(4, train_tasks=[0, 2, 3])
    sac = make_sac(spec, encoder=STATES_CONTEXT, conditioning=NoConditioning)
    sac.untrained.fill(sac.acting_modules())
    embedding_TC = sac.encoder.context.embedding.weight_TC
    assert torch.equal(embedding_TC[1], embedding_TC[[0, 2, 3]].mean(0))
