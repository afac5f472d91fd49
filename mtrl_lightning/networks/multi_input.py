"""An encoder of images and vectors together.

Shapes: ``B`` rows of any tasks ``[B]`` or of a learning batch ``[R, n]``, ``S`` stacked
observations, ``D`` bytes of a packed observation, ``C`` channels, ``H`` height, ``W`` width, ``N``
numbers of the vector, ``F`` features of the convolutions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.encoder import Encoder
from mtrl_lightning.networks.pixel_encoder import PixelEncoder
from mtrl_lightning.networks.standardize import Standardize
from mtrl_lightning.spec import EnvSpec


class MultiInput(PixelEncoder):
    """Encode images with convolutions and a projection, and append the standardized vector.

    Observations are images and vectors of a dictionary (``spec.observation_parts``). The newest
    vector is standardized by statistics of the first batches, as by ``Standardize``.

    Args:
        spec: the tasks.
        num_updates: number of first updates whose batches are in the vector's statistics.
        options: further arguments of ``PixelEncoder``; ``out_dim`` is that of the images' features.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        num_updates: int = 100,
        **options: Any,
    ) -> None:
        if not spec.observation_parts:
            raise ConfigurationError(
                "the encoder MultiInput requires images with vectors, but observations have"
                f" shape {spec.observation_space.shape}: choose -c encoder/pixels or"
                " encoder/mlp"
            )
        (self._size,), self._image_shape = (part.shape for part in spec.observation_parts)
        stack = spec.observation_space.shape[:1]
        image = Box(0, 255, (*stack, *self._image_shape), np.uint8)
        vector = Box(-np.inf, np.inf, (self._size,), np.float32)
        super().__init__(spec._replace(observation_space=image), **options)
        self.standardize = Standardize(
            spec._replace(observation_space=vector), num_updates=num_updates, per_task=False
        )
        self.out_dim += self._size

    def observe(self, observation_BD: Tensor, task_B: Tensor) -> bool:
        """Update the statistics of the vector."""
        return self.standardize.observe(state_of(observation_BD, self._size), task_B)

    def layers(self, observation_BD: Tensor) -> Tensor:
        """Map packed observations ``[..., S, D]`` to ``[..., F + N]``."""
        features_BF = super().layers(image_of(observation_BD, self._size, self._image_shape))
        vector_BN = state_of(observation_BD, self._size)
        # all tasks share the statistics, so none is needed
        standardized_BN = self.standardize(vector_BN, torch.empty(0, dtype=torch.int64))
        return torch.cat([features_BF, standardized_BN.to(features_BF.dtype)], dim=-1)

    def make_decoder(self) -> nn.Module:
        """Raise that there is none."""
        return Encoder.make_decoder(self)


def state_of(observation_BD: Tensor, size: int) -> Tensor:
    """Return the newest vector ``[..., N]`` of packed observations ``[..., S, D]``."""
    return observation_BD[..., -1, : 4 * size].contiguous().view(torch.float32)


def image_of(observation_BD: Tensor, size: int, shape: Sequence[int]) -> Tensor:
    """Return the images ``[..., S, C, H, W]`` of packed observations ``[..., S, D]``, as a view."""
    start = 4 * size
    return observation_BD[..., start : start + int(np.prod(shape))].unflatten(-1, tuple(shape))
