"""Encoders: map observations to features.

The critic loss trains the encoder. The actor receives detached features.

Shapes: ``B`` rows of any tasks ``[B]`` or of a training batch ``[R, n]``, ``D`` observation, ``C``
task input or context, ``F`` features that actor and critic share, ``Z`` latent features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning
from mtrl_lightning.networks.network import Network
from mtrl_lightning.spec import EnvSpec


class Encoder(nn.Module):
    """Map observations and tasks to features.

    Built by a factory ``(spec) -> Encoder``.

    Args:
        spec: the tasks.
    """

    out_dim: int
    """Number of output features, including the context's."""
    context: TaskConditioning | None
    """A context per task, appended to the features and trained by auxiliary losses; None without
    a context."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.context = None

    def observe(self, observation_BD: Tensor, task_B: Tensor) -> bool:
        """Update statistics with the observations of the next critic update, ``[B, ...]``.

        Statistics are persistent buffers: a target encoder, whose ``observe`` is not called, gets
        copies of them. Each process receives its share of the observations, but all processes must
        compute the same statistics, for example with ``distributed.merged_moments``.

        Returns:
            Whether the statistics have changed. The base class has none.
        """
        return False

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map observations ``[B, ...]`` and tasks ``[B]`` to ``[B, out_dim]``."""
        raise NotImplementedError

    @property
    def latent_dim(self) -> int:
        """Number of features without the context's, ``Z``."""
        return self.out_dim - (0 if self.context is None else self.context.out_dim)

    def latent(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the features without the context's, ``[B, Z]``: the targets of latent models."""
        features_BZ: Tensor = self(observation_BD, task_B)
        return features_BZ[..., : self.latent_dim]

    def shared_features(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the input of ``project``, ``[B, F]``; by default the output itself."""
        return self(observation_BD, task_B)  # type: ignore[no-any-return]

    def project(self, shared_BF: Tensor) -> Tensor:
        """Map the shared features to the output, ``[B, out_dim]``."""
        return shared_BF

    def make_actor(
        self,
        make_network: Callable[[int, int, EnvSpec], Network],
        in_dim: int,
        out_dim: int,
        spec: EnvSpec,
    ) -> Network:
        """Build a policy network on the shared features; by default, these are the output.

        Args:
            make_network: ``(in_dim, out_dim, spec) -> Network``.
            in_dim: the encoder's ``out_dim``.
            out_dim: number of outputs.
            spec: the tasks.
        """
        return make_network(in_dim, out_dim, spec)

    def make_decoder(self) -> nn.Module:
        """Return a new module that maps latent features ``[B, Z]`` to observations ``[B, ...]``."""
        raise ConfigurationError(
            f"the encoder {type(self).__name__} has no decoder, which reconstruction requires:"
            " choose another encoder (-c encoder/mlp for states, -c encoder/pixels for images)"
        )


def require_vectors(observation_space: Box, encoder: str) -> None:
    """Check that observations are state vectors."""
    if len(observation_space.shape) != 1:
        raise ConfigurationError(
            f"the encoder {encoder} requires state vectors,"
            f" but observations have shape {observation_space.shape}:"
            " set model.init_args.encoder to an image encoder (-c encoder/pixels), for images with"
            " vectors to MultiInput (-c encoder/multi_input), or, for stacked vectors, append"
            " gymnasium.wrappers.FlattenObservation to data.wrappers"
        )


class Identity(Encoder):
    """Return a state vector unchanged.

    Args:
        spec: the tasks; observations are vectors.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        require_vectors(spec.observation_space, type(self).__name__)
        self.out_dim = spec.observation_space.shape[0]

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the observations."""
        return observation_BD


class AppendTask(Identity):
    """Append the task input to a state vector.

    Actor and critics then share one task conditioning, which the critic loss trains. BRC (Nauman et
    al. 2025, arXiv 2505.23150) uses an ``Embedding`` of size 32 and unit norm.

    Args:
        spec: the tasks; observations are vectors.
        conditioning: the appended task conditioning.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        conditioning: Callable[[EnvSpec], TaskConditioning] = OneHot,
    ) -> None:
        super().__init__(spec)
        self.conditioning = conditioning(spec)
        self.out_dim += self.conditioning.out_dim

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, D]`` to ``[B, D + C]``."""
        return torch.cat([observation_BD, self.conditioning(task_B)], dim=-1)
