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
from mtrl_lightning.networks import MLP, NoConditioning
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
from tests.helpers.auxiliaries import PIXELS, STATES, STATES_CONTEXT
from tests.helpers.checkpoints import assert_continued_is_the_same

ENSEMBLE = partial(TransitionEnsemble, size=2, width=8)
CASES = {
    "states: deepmdp": (STATES, [partial(LatentDynamics, width=8)]),
    "states: ensemble": (
        STATES_CONTEXT,
        [partial(LatentDynamics, transition=ENSEMBLE, reward_from="next_features")],
    ),
    "states: hipbmdp": (STATES_CONTEXT, [partial(HiPBMDP, width=8, num_others=1)]),
    "pictures: sac_ae": (PIXELS, [Reconstruction]),
    "pictures: drq": (PIXELS, []),
}


def case_sac(name, **options):
    encoder, auxiliaries = CASES[name]
    network = partial(MLP, width=16, depth=1, output_bound=0.3)
    given = {"actor": network, "critic": network, "encoder_tau": 0.05, **options}
    if name == "pictures: drq":
        given["transforms"] = [RandomShift]
    if encoder is STATES_CONTEXT:
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


def test_only_the_decoders_weights_decay():
    sac = case_sac("pictures: sac_ae")
    of_encoder, of_decoder = sac.auxiliary_updates[0].configure_optimizer().param_groups
    assert list(map(id, of_encoder["params"])) == list(map(id, sac.encoder.parameters()))
    assert list(map(id, of_decoder["params"])) == list(map(id, sac.auxiliaries.parameters()))
    assert (of_encoder["weight_decay"], of_decoder["weight_decay"]) == (0.0, 1e-7)


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
