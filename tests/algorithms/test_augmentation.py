"""The random shift against a loop, and its draws."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from mtrl_lightning.algorithms import RandomShift
from mtrl_lightning.networks import PixelEncoder
from mtrl_lightning.updates.augmentation import cropped_together, padded, shifted
from tests.helpers.algorithms import make_batch, make_sac, pixel_spec, train

SPEC = pixel_spec()


def with_generator(padding=4, seed=0):
    transform = RandomShift(SPEC, padding)
    generator = torch.Generator().manual_seed(seed)
    transform.generator = lambda device: generator
    return transform


def naive(images, offsets, padding):
    """Pad and crop image after image."""
    result = np.empty_like(images)
    edges = [(0, 0)] * (images.ndim - 3) + [(padding, padding)] * 2
    height, width = images.shape[-2:]
    for row, (y, x) in enumerate(offsets):
        padded = np.pad(images[row], edges, mode="edge")
        result[row] = padded[..., y : y + height, x : x + width]
    return result


@pytest.mark.parametrize("padding", [1, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_it_is_the_loop(padding, dtype):
    images = make_batch(SPEC).observation_RnD.flatten(0, 1).to(dtype)
    generator = torch.Generator().manual_seed(1)
    offsets = torch.randint(2 * padding + 1, (len(images), 2), generator=generator)
    offsets[0] = 0
    offsets[1] = 2 * padding
    found = shifted(images, offsets, padding)
    assert found.dtype == dtype
    expected = naive(images.numpy(), offsets.tolist(), padding)
    assert np.array_equal(found.numpy(), expected)
    padded_BCHW = padded(images.flatten(1, 2), padding)
    together = cropped_together(padded_BCHW, offsets, *images.shape[-2:])
    assert torch.equal(together.view_as(found), found), "a GPU gets the same"
    assert torch.equal(shifted(images, torch.full_like(offsets, padding), padding), images)


def test_observations_are_shifted_independently_by_every_shift():
    batch = make_batch(SPEC, rows=200)
    same = batch._replace(next_observation_RnD=batch.observation_RnD)
    transform = with_generator(padding=1)
    after = transform(same)
    seen = {"observation_RnD": set(), "next_observation_RnD": set()}
    num_equal = 0
    pictures = batch.observation_RnD.flatten(0, 1)
    candidates = {
        (y, x): shifted(pictures, torch.tensor([[y, x]]).expand(600, 2), 1)
        for y in range(3)
        for x in range(3)
    }
    chosen = []
    for name, offsets in seen.items():
        assert getattr(after, name).shape == batch.observation_RnD.shape
        found = getattr(after, name).flatten(0, 1)
        matches = torch.stack(
            [(found == image).flatten(1).all(1) for image in candidates.values()], 1
        )
        assert (matches.sum(1) == 1).all(), "each row is one crop, the same for its frames"
        chosen.append(matches.int().argmax(1))
        offsets |= {list(candidates)[place] for place in chosen[-1].tolist()}
        assert offsets == set(candidates)
    num_equal = int((chosen[0] == chosen[1]).sum())
    assert 30 < num_equal < 110  # a ninth of 600
    for name in ("action_RnA", "reward_Rn", "terminated_Rn", "task_Rn"):
        assert torch.equal(getattr(after, name), getattr(batch, name))


def test_its_generator_is_in_the_checkpoint_and_of_each_rank(monkeypatch):
    options = {
        "encoder": partial(PixelEncoder, channels=2, out_dim=4),
        "transforms": [RandomShift, partial(RandomShift, padding=2)],
    }
    sac, other = (make_sac(SPEC, seed=3, **options) for _ in range(2))
    train(sac, 2)
    used = sac.generators.state_dict()
    # the reward scale is the first transform, and draws nothing
    assert {"transform_1", "transform_2"} <= set(used["per_rank"][0])
    other.generators.load_state_dict(used)
    batch = make_batch(SPEC)
    images = [one.transforms(batch).observation_RnD for one in (sac, other)]
    assert torch.equal(*images)
    assert not torch.equal(images[0], sac.transforms(batch).observation_RnD)
    fresh = make_sac(SPEC, seed=3, **options)
    first = fresh.transforms(batch).observation_RnD
    monkeypatch.setattr("mtrl_lightning.ranks.distributed.rank", lambda: 1)
    second = make_sac(SPEC, seed=3, **options).transforms(batch).observation_RnD
    assert not torch.equal(first, second)
