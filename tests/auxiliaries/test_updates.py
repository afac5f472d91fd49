"""When and what an auxiliary's step trains; what a checkpoint restores."""

from functools import partial

import pytest

from mtrl_lightning.algorithms import RandomShift
from mtrl_lightning.auxiliaries import (
    HiPBMDP,
    LatentDynamics,
    Reconstruction,
    TransitionEnsemble,
)
from mtrl_lightning.networks import MLP, NoConditioning
from tests.helpers.algorithms import changed, copy_of, make_sac, make_spec, pixel_spec, train
from tests.helpers.auxiliaries import PIXELS, STATES, STATES_CONTEXT
from tests.helpers.checkpoints import assert_continued_is_the_same

ENSEMBLE = partial(TransitionEnsemble, size=2, width=8)
CASES = {
    "states: deepmdp": (STATES, [partial(LatentDynamics, width=8)]),
    "states: ensemble": (
        STATES_CONTEXT,
        [partial(LatentDynamics, transition=ENSEMBLE, reward_from="next_features")],
    ),
    "states: hipbmdp": (STATES_CONTEXT, [partial(HiPBMDP, width=8)]),
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


@pytest.mark.parametrize(
    ("make", "after"),
    [
        (partial(LatentDynamics, width=8), "critic"),
        (partial(LatentDynamics, width=8, after="targets"), "targets"),  # mtrl's order
        (Reconstruction, "targets"),
    ],
)
def test_auxiliary_follows_the_critics_or_the_targets(make, after):
    sac = make_sac(encoder=STATES, auxiliaries=[make], tau=1.0)
    order = []
    for update in sac.updates:
        update.call_hook = lambda hook, *_, name=update.name: order.append((hook, name))
    train(sac, 1)
    steps = [name for hook, name in order if hook == "on_before_optimizer_step"]
    assert steps.pop(1 if after == "critic" else 3) == type(sac.auxiliaries[0]).__name__.lower()
    assert steps == ["critic", "actor", "temperature"]
    # the targets are the networks that their step has found
    assert (changed(sac.target_encoder, copy_of(sac.encoder)) == set()) == (after == "critic")


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
