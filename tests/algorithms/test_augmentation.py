"""The random shift against a loop, and its draws."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import RandomShift
from mtrl_lightning.networks import PixelEncoder
from mtrl_lightning.updates.augmentation import cropped_together, padded, shifted
from mtrl_lightning.utils.devices import CPU
from tests.helpers.algorithms import make_batch, make_sac, pixel_spec

SPEC = pixel_spec()


def slow_shift(images, offsets, padding):
    """Pad and crop image after image."""
    result = np.empty_like(images)
    edges = [(0, 0)] * (images.ndim - 3) + [(padding, padding)] * 2
    height, width = images.shape[-2:]
    for row, (y, x) in enumerate(offsets):
        larger = np.pad(images[row], edges, mode="edge")
        result[row] = larger[..., y : y + height, x : x + width]
    return result


@pytest.mark.parametrize(("padding", "dtype"), [(1, torch.uint8), (4, torch.float32)])
def test_it_is_the_loop(padding, dtype):
    images = make_batch(SPEC).observation_RnD.flatten(0, 1).to(dtype)
    generator = torch.Generator().manual_seed(1)
    offsets = torch.randint(2 * padding + 1, (len(images), 2), generator=generator)
    offsets[0], offsets[1] = 0, 2 * padding
    found = shifted(images, offsets, padding)
    assert found.dtype == dtype
    assert np.array_equal(found, slow_shift(images.numpy(), offsets.tolist(), padding))
    padded_BCHW = padded(images.flatten(1, 2), padding)
    together = cropped_together(padded_BCHW, offsets, *images.shape[-2:])
    assert torch.equal(together.view_as(found), found), "a GPU gets the same"


def test_observations_are_shifted_independently_by_every_shift():
    batch = make_batch(SPEC, rows=200)
    transform = RandomShift(SPEC, padding=1)
    generator = torch.Generator().manual_seed(0)
    transform.generator = lambda device: generator
    after = transform(batch._replace(next_observation_RnD=batch.observation_RnD))
    images = batch.observation_RnD.flatten(0, 1)
    offsets = torch.tensor(list(itertools.product(range(3), range(3))))
    candidates = [shifted(images, offset_2.expand(600, 2), 1) for offset_2 in offsets]
    chosen = []
    for name in ("observation_RnD", "next_observation_RnD"):
        found = getattr(after, name).flatten(0, 1)
        matches = torch.stack([(found == image).flatten(1).all(1) for image in candidates], 1)
        assert (matches.sum(1) == 1).all(), "each row is one crop, the same for its frames"
        assert matches.any(0).all(), "every shift is drawn"
        chosen.append(matches.int().argmax(1))
    assert 30 < int((chosen[0] == chosen[1]).sum()) < 110  # a ninth of 600


def test_each_shift_has_a_generator_of_each_rank():
    encoder = partial(PixelEncoder, channels=2, out_dim=4)
    sac = make_sac(SPEC, encoder=encoder, transforms=[RandomShift, RandomShift])
    # the reward scale is the first transform, and draws nothing
    assert sac.generators.per_rank >= {"transform_1", "transform_2"}
    for i in (1, 2):
        assert sac.transforms[i].generator(CPU) is sac.generators.get(f"transform_{i}", CPU)
