"""SAC-AE's autoencoder: its loss, its targets, its images; when auxiliaries are trained."""

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.auxiliaries import LatentDynamics, Reconstruction
from mtrl_lightning.auxiliaries.reconstruction import preprocessed
from tests.helpers.algorithms import (
    changed,
    copy_of,
    make_batch,
    make_sac,
    make_spec,
    pixel_spec,
    train,
)
from tests.helpers.auxiliaries import PIXELS, STATES, STATES_CONTEXT, inputs, make_encoder, reached

SPEC = pixel_spec()
BATCH = make_batch(SPEC, rows=3)


def test_bytes_are_reduced_to_five_bits_with_noise():
    byte_B = torch.arange(256, dtype=torch.uint8)
    noise_B = torch.rand(256, generator=torch.Generator().manual_seed(4))
    found_B = preprocessed(byte_B, torch.Generator().manual_seed(4))
    expected_B = np.arange(256) // 8 / 32 + noise_B.numpy() / 32 - 0.5
    np.testing.assert_allclose(found_B, expected_B, atol=1e-7)


def test_the_loss_of_images():
    encoder = make_encoder(SPEC, PIXELS)
    auxiliary = Reconstruction(SPEC, encoder, latent_weight=0.3)
    z_RnZ = encoder(BATCH.observation_RnD, BATCH.task_Rn)
    target = preprocessed(BATCH.observation_RnD, torch.Generator().manual_seed(0))
    error_Rn = ((auxiliary.decoder(z_RnZ) - target) ** 2).mean((2, 3, 4, 5))
    expected = (error_Rn + 0.3 * (z_RnZ**2).sum(2) / 2).mean(1)
    loss_R = auxiliary.loss(BATCH, inputs(encoder))
    torch.testing.assert_close(loss_R, expected)
    found = auxiliary.metrics()["reconstruction_error"]
    torch.testing.assert_close(found, error_Rn.detach().mean())
    trained = reached(loss_R.sum(), encoder, auxiliary)
    assert trained == {"convolutions", "projection", "decoder"}


@pytest.mark.parametrize("make", [STATES, STATES_CONTEXT])
def test_the_loss_of_states_leaves_padding_out(make):
    spec = make_spec()._replace(observation_sizes=(4, 2, 3))
    encoder = make_encoder(spec, make)
    auxiliary = Reconstruction(spec, encoder, latent_weight=0.0)
    batch = make_batch(spec, rows=2)
    mask_RnD = torch.from_numpy(spec.observation_mask_TD)[batch.task_Rn]
    batch = batch._replace(observation_RnD=batch.observation_RnD * mask_RnD)
    decoded = auxiliary.decoder(encoder.latent(batch.observation_RnD, batch.task_Rn))
    error = (decoded - batch.observation_RnD) ** 2
    expected = [error[task, :, :size].mean() for task, size in enumerate((4, 2, 3))]
    torch.testing.assert_close(auxiliary.loss(batch, inputs(encoder)), torch.stack(expected))
    assert auxiliary.images(encoder) == {}


def test_images_show_the_newest_frame_and_what_is_decoded():
    sac = train(make_sac(SPEC, encoder=PIXELS, auxiliaries=[Reconstruction]), 1)
    encoder, decoder = sac.encoder, sac.auxiliaries[0].decoder
    image = sac.images()["reconstruction"]
    assert image.dtype == np.uint8 and image.shape == (2 * 17, 3 * 19, 3)
    batch = make_batch(SPEC)
    for task in range(3):
        columns = slice(19 * task, 19 * (task + 1))
        newest = batch.observation_RnD[task, 0, -1].numpy().transpose(1, 2, 0)
        assert np.array_equal(image[:17, columns], newest)
        z_BZ = encoder(batch.observation_RnD[task, :1], batch.task_Rn[task, :1])
        decoded = decoder(z_BZ)[0, -1].detach().numpy().transpose(1, 2, 0)
        shown = np.clip((decoded + 0.5) * 255, 0, 255)
        np.testing.assert_allclose(image[17:, columns], shown, atol=0.51)


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
