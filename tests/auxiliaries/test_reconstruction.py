"""SAC-AE's autoencoder: its loss, its targets, its images."""

import numpy as np
import pytest
import torch

from mtrl_lightning.auxiliaries import Reconstruction
from mtrl_lightning.auxiliaries.reconstruction import preprocessed
from tests.helpers.algorithms import make_batch, make_sac, make_spec, pixel_spec, train
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
