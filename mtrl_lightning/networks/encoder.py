"""Encoders: observations in, features out.

The critic's loss trains the encoder; the actor sees its features detached.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning


class Encoder(nn.Module):
    """Observations and tasks in, features out; built by a factory ``(observation_space, num_tasks) -> Encoder``.

    Args:
        observation_space: what comes in.
        num_tasks: number of tasks, ``T``.
    """

    out_dim: int
    """Features that come out."""

    def __init__(self, observation_space: Box, num_tasks: int) -> None:
        super().__init__()

    def observe(self, observation_BD: Tensor) -> None:
        """Hear of the observations that the critic is about to be trained on."""

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map observations ``[B, ...]`` and tasks ``[B]`` to ``[B, out_dim]``."""
        raise NotImplementedError


class Identity(Encoder):
    """Take a state vector as it is.

    Args:
        observation_space: one-dimensional.
        num_tasks: not used.

    Raises:
        ConfigurationError: if observations are not vectors, such as images.
    """

    def __init__(self, observation_space: Box, num_tasks: int) -> None:
        super().__init__(observation_space, num_tasks)
        if len(observation_space.shape) != 1:
            raise ConfigurationError(
                f"the encoder {type(self).__name__} takes state vectors, and observations have the"
                f" shape {observation_space.shape}: set model.init_args.encoder to an encoder of"
                " images"
            )
        self.out_dim = observation_space.shape[0]

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the observations."""
        return observation_BD


class AppendTask(Identity):
    """Append what tells the task to a state vector: one learned table for actor and critics, trained by the critics.

    BRC (Nauman et al. 2025, arXiv 2505.23150) does it with an ``Embedding`` of 32 numbers and unit
    norm.

    Args:
        observation_space: one-dimensional.
        num_tasks: number of tasks, ``T``.
        conditioning: how the task is told.
    """

    def __init__(
        self,
        observation_space: Box,
        num_tasks: int,
        *,
        conditioning: Callable[[int], TaskConditioning] = OneHot,
    ) -> None:
        super().__init__(observation_space, num_tasks)
        self.conditioning = conditioning(num_tasks)
        self.out_dim += self.conditioning.out_dim

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, D]`` to ``[B, D + C]``."""
        return torch.cat([observation_BD, self.conditioning(task_B)], dim=-1)


class Standardize(Identity):
    """Shift and scale a state vector by the mean and standard deviation of what was seen in the first updates.

    MetaWorld's positions differ by centimetres from episode to episode, which a network hardly sees
    otherwise. The statistics are frozen after ``num_updates``, because values learned with other
    statistics would be wrong.

    Args:
        observation_space: one-dimensional.
        num_tasks: not used.
        num_updates: updates whose batches are counted, at least 1.
        min_std: smallest standard deviation divided by.
        clip: largest magnitude that comes out.
    """

    mean_D: Tensor
    variance_D: Tensor
    count: Tensor

    def __init__(
        self,
        observation_space: Box,
        num_tasks: int,
        *,
        num_updates: int = 100,
        min_std: float = 0.02,
        clip: float = 10.0,
    ) -> None:
        super().__init__(observation_space, num_tasks)
        self._num_updates, self._min_std, self._clip = num_updates, min_std, clip
        self.register_buffer("mean_D", torch.zeros(self.out_dim))
        self.register_buffer("variance_D", torch.ones(self.out_dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self._seen = 0
        self.register_load_state_dict_post_hook(
            lambda module, _: setattr(module, "_seen", int(module.count))
        )

    def observe(self, observation_BD: Tensor) -> None:
        """Take a batch into the statistics: batches are of equal size, so means of batches are means of rows."""
        if self._seen >= self._num_updates:
            return
        weight = 1 / (self._seen + 1)
        mean_D, variance_D = observation_BD.mean(0), observation_BD.var(0, correction=0)
        shift_D = mean_D - self.mean_D
        if self._seen == 0:
            self.variance_D.zero_()
        # Chan et al. 1979: the variance of a union is the mean variance plus the variance of the
        # means
        self.variance_D += (
            weight * (variance_D - self.variance_D) + weight * (1 - weight) * shift_D.square()
        )
        self.mean_D += weight * shift_D
        self.count += 1
        self._seen += 1

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the standardized observations."""
        std_D = self.variance_D.sqrt().clamp(min=self._min_std)
        return ((observation_BD - self.mean_D) / std_D).clamp(-self._clip, self._clip)
