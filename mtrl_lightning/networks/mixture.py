"""A mixture of encoders with a choice of assignments (mtrl; Sodhani et al. 2021).

Shapes: ``B`` batch, ``D`` observation, ``K`` experts, ``Z`` features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gymnasium.spaces import Box
from torch import Tensor

from mtrl_lightning.checks import at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.assignments import Assignment, Average
from mtrl_lightning.networks.encoder import Encoder
from mtrl_lightning.networks.experts import Experts
from mtrl_lightning.types import EnvSpec


class MixtureOfEncoders(Encoder):
    """Mix the features of ``K`` perceptrons ``z_k``: ``sum_k a_k(task) z_k(observation)``.

    Args:
        spec: the tasks; observations are vectors.
        num_experts: number of perceptrons, ``K``; up to 10 in mtrl.
        width: size of a hidden layer; 50 in mtrl.
        depth: number of hidden layers; 2 by default. mtrl has 1, because its setting of 2 layers
            includes the output layer.
        out_dim: number of output features, ``Z``; 50 in mtrl.
        assignment: weights ``a`` of the perceptrons, given the task.

    Raises:
        ConfigurationError: if observations are images.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        num_experts: int = 10,
        width: int = 50,
        depth: int = 2,
        out_dim: int = 50,
        assignment: Callable[[int, EnvSpec], Assignment] = Average,
    ) -> None:
        super().__init__(spec)
        self.experts = make_encoders(spec.observation_space, num_experts, width, depth, out_dim)
        self.assignment = assignment(num_experts, spec)
        self.out_dim = out_dim

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, D]`` and ``[B]`` to ``[B, Z]``."""
        return torch.einsum("kbz,bk->bz", self.experts(observation_BD), self.assignment(task_B))


def make_encoders(
    observation_space: Box, num_experts: int, width: int, depth: int, out_dim: int
) -> Experts:
    """Return perceptrons that encode state vectors.

    Raises:
        ConfigurationError: if observations are images, or a size is below 1.
    """
    if len(observation_space.shape) != 1:
        raise ConfigurationError(
            f"observations have the shape {observation_space.shape}:"
            " a mixture of encoders needs state vectors, use another encoder for images"
        )
    at_least(1, num_experts=num_experts, width=width, depth=depth, out_dim=out_dim)
    return Experts(num_experts, observation_space.shape[0], out_dim, width=width, depth=depth)
