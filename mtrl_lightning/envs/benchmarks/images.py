"""Gymnasium environments whose observations are images, or images and vectors together.

Shapes: ``C`` channels, ``H`` height, ``W`` width, ``N`` numbers of the vectors, ``D`` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Tuple
from gymnasium.wrappers import TransformObservation

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import Field

MOST_CHANNELS = 4
"""An image whose last axis is at most as long has its channels there."""
FLATTENED = 1000
"""A vector with as many numbers from 0 to 255 is a flattened image."""


def is_image(space: gym.Space) -> bool:
    """Return whether a space has images of bytes: with or without channels, one or several."""
    return isinstance(space, Box) and space.dtype == np.uint8 and 2 <= len(space.shape) <= 4


def with_image_observations(name: str, env: gym.Env) -> tuple[gym.Env, tuple[Field, ...]]:
    """Return an environment whose images are one array, and the parts of a packed observation.

    Channels come first, ``[1, C, H, W]``. Images and vectors of a dictionary or tuple are packed as
    one row of bytes ``[1, D]``: the vectors in single precision, the images one after the other as
    channels. Other observations are unchanged.

    Args:
        name: of the task.
        env: the environment.
    """
    space = env.observation_space
    if isinstance(space, Box) and len(space.shape) == 1:
        if int(((space.low == 0) & (space.high == 255)).sum()) >= FLATTENED:
            raise ConfigurationError(
                f"task {name!r}: its observation vector of {space.shape[0]:,} numbers contains a"
                " flattened image: remove FlattenObservation, and use -c encoder/pixels or, for a"
                " dictionary of images and vectors, -c encoder/multi_input"
            )
        return env, ()
    if is_image(space):
        assert space.shape is not None
        shape = channels_first(np.zeros(space.shape, np.uint8)).shape
        image = Box(0, 255, (1, *shape), np.uint8)
        return TransformObservation(env, lambda x: channels_first(x)[None], image), ()
    if not isinstance(space, Dict | Tuple):
        return env, ()
    parts: dict[Any, Any] = dict(space.items() if isinstance(space, Dict) else enumerate(space))
    images = [key for key, part in parts.items() if is_image(part)]
    vectors = [key for key, part in parts.items() if key not in images]
    if not images or not all(isinstance(parts[key], Box) for key in vectors):
        return env, ()
    shapes = [channels_first(np.zeros(parts[key].shape, np.uint8)).shape for key in images]
    if len({shape[1:] for shape in shapes}) > 1:
        raise ConfigurationError(
            f"task {name!r}: its images have the sizes {', '.join(map(str, shapes))}: make them"
            " equal (gymnasium.wrappers.ResizeObservation)"
        )
    image_shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    size = sum(int(np.prod(parts[key].shape)) for key in vectors)
    if not size:
        image = Box(0, 255, (1, *image_shape), np.uint8)
        return TransformObservation(env, lambda x: _images(x, images)[None], image), ()
    fields = parts_of(size, image_shape)
    packed_space = Box(0, 255, (1, packed_size(fields)), np.uint8)
    pack = partial(_packed_parts, images=images, vectors=vectors)
    return TransformObservation(env, pack, packed_space), fields


def parts_of(size: int, image_shape: tuple[int, ...]) -> tuple[Field, ...]:
    """Return the parts of a packed observation of so many numbers and an image ``[C, H, W]``."""
    return (Field("state", (size,)), Field("image", image_shape, "uint8"))


def packed_size(parts: Sequence[Field]) -> int:
    """Return the bytes of a packed observation, a multiple of those of a number."""
    num_bytes = sum(part.num_bytes for part in parts)
    return num_bytes + -num_bytes % 4


def packed(state_N: npt.NDArray, image_CHW: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return a vector, in single precision, and an image as one row of bytes ``[D]``."""
    content = np.concatenate([state_N.astype(np.float32).view(np.uint8), image_CHW.ravel()])
    return np.pad(content, (0, -len(content) % 4))


def channels_first(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return ``[H, W]``, ``[H, W, C]``, ``[C, H, W]`` or a stack of these as ``[C, H, W]``."""
    if image.ndim == 2:
        return image[None]
    if image.shape[-1] <= MOST_CHANNELS:
        image = np.moveaxis(image, -1, -3)
    return np.ascontiguousarray(image).reshape(-1, *image.shape[-2:])


def _images(observation: Any, keys: list) -> npt.NDArray[np.uint8]:
    return np.concatenate([channels_first(observation[key]) for key in keys])


def _packed_parts(observation: Any, images: list, vectors: list) -> npt.NDArray[np.uint8]:
    state = np.concatenate([np.ravel(observation[key]) for key in vectors])
    return packed(state, _images(observation, images))[None]
