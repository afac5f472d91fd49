"""When and what an auxiliary's step trains."""

from functools import partial

import pytest

from mtrl_lightning.auxiliaries import LatentDynamics, Reconstruction
from tests.helpers.algorithms import changed, copy_of, make_sac, pixel_spec, train
from tests.helpers.auxiliaries import PIXELS, STATES

DEEPMDP = partial(LatentDynamics, width=8)


@pytest.mark.parametrize(
    ("make", "after"),
    [
        (DEEPMDP, "critic"),
        (partial(DEEPMDP, after="targets"), "targets"),  # mtrl's order
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
    sac = make_sac(pixel_spec(), encoder=PIXELS, auxiliaries=[Reconstruction])
    of_encoder, of_decoder = sac.auxiliary_updates[0].configure_optimizer().param_groups
    assert list(map(id, of_encoder["params"])) == list(map(id, sac.encoder.parameters()))
    assert list(map(id, of_decoder["params"])) == list(map(id, sac.auxiliaries.parameters()))
    assert (of_encoder["weight_decay"], of_decoder["weight_decay"]) == (0.0, 1e-7)


def test_reset_clears_the_encoders_moments_and_keeps_auxiliaries():
    sac = train(make_sac(encoder=STATES, auxiliaries=[DEEPMDP]), 2)
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
