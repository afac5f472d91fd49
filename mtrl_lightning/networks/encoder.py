"""Encoders: map observations to features.

The critic's loss trains the encoder. The actor receives its features detached.

Shapes: ``B`` batch, ``D`` observation, ``C`` task input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning


class Encoder(nn.Module):
    """Map observations and tasks to features.

    Built by a factory ``(observation_space, num_tasks) -> Encoder``.

    Args:
        observation_space: space of the observations.
        num_tasks: number of tasks, ``T``.
    """

    out_dim: int
    """Number of output features."""

    def __init__(self, observation_space: Box, num_tasks: int) -> None:
        super().__init__()

    def observe(self, observation_BD: Tensor) -> None:
        """Update statistics with the observations of the next critic update, ``[B, ...]``."""

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map observations ``[B, ...]`` and tasks ``[B]`` to ``[B, out_dim]``."""
        raise NotImplementedError


class Identity(Encoder):
    """Return a state vector unchanged.

    Args:
        observation_space: one-dimensional observation space.
        num_tasks: not used.

    Raises:
        ConfigurationError: if observations are not vectors, such as images.
    """

    def __init__(self, observation_space: Box, num_tasks: int) -> None:
        super().__init__(observation_space, num_tasks)
        if len(observation_space.shape) != 1:
            raise ConfigurationError(
                f"the encoder {type(self).__name__} takes state vectors,"
                f" and observations have the shape {observation_space.shape}:"
                " set model.init_args.encoder to an encoder of images"
            )
        self.out_dim = observation_space.shape[0]

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the observations."""
        return observation_BD


class AppendTask(Identity):
    """Append the task input to a state vector.

    Actor and critics then share one task conditioning, which the critic's loss trains. BRC (Nauman
    et al. 2025, arXiv 2505.23150) uses an ``Embedding`` of size 32 and unit norm.

    Args:
        observation_space: one-dimensional observation space.
        num_tasks: number of tasks, ``T``.
        conditioning: task conditioning that is appended.
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
    """Standardize a state vector by the mean and standard deviation of the first batches.

    Positions in MetaWorld differ by centimetres from episode to episode, a difference that is small
    for a network. The statistics are frozen after ``num_updates``, because networks trained with
    some statistics give wrong values with others.

    Args:
        observation_space: one-dimensional observation space.
        num_tasks: not used.
        num_updates: number of first updates whose batches are used, at least 1.
        min_std: lower bound of the standard deviations.
        clip: largest absolute value of the output.
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
        self._num_updates = num_updates
        self._min_std = min_std
        self._clip = clip
        self.register_buffer("mean_D", torch.zeros(self.out_dim))
        self.register_buffer("variance_D", torch.ones(self.out_dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self._seen = 0
        self.register_load_state_dict_post_hook(
            lambda module, _: setattr(module, "_seen", int(module.count))
        )

    def observe(self, observation_BD: Tensor) -> None:
        """Update the statistics with a batch ``[B, D]``; all batches must have the same size."""
        if self._seen >= self._num_updates:
            return
        weight = 1 / (self._seen + 1)
        mean_D = observation_BD.mean(0)
        variance_D = observation_BD.var(0, correction=0)
        shift_D = mean_D - self.mean_D
        if self._seen == 0:
            self.variance_D.zero_()
        # Chan et al. 1979: the variance of a union of batches of one size is the mean of their
        # variances plus the variance of their means
        within_D = weight * (variance_D - self.variance_D)
        between_D = weight * (1 - weight) * shift_D.square()
        self.variance_D += within_D + between_D
        self.mean_D += weight * shift_D
        self.count += 1
        self._seen += 1

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the standardized observations."""
        std_D = self.variance_D.sqrt().clamp(min=self._min_std)
        return ((observation_BD - self.mean_D) / std_D).clamp(-self._clip, self._clip)
