"""CARE: contextual attention-based representation learning.

Sodhani, Zhang and Pineau 2021, "Multi-Task Reinforcement Learning with Context-based
Representations".

Shapes: ``B`` batch, ``C`` context, ``D`` observation, ``K`` experts, ``Z`` features of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import TaskConditioning, TaskEncoder
from mtrl_lightning.networks.encoder import Encoder
from mtrl_lightning.networks.language import Language
from mtrl_lightning.networks.mixture import make_encoders
from mtrl_lightning.types import EnvSpec


class CARE(Encoder):
    """Mix encoders by attention to a task context, and append the context.

    The features are ``sum_k a_k z_k(observation) || z_context(task)`` with
    ``a = softmax_k <z_k, sg(z_context)>``. They contain the task: combine CARE with actor and
    critic networks with ``NoConditioning``. The stop-gradient ``sg`` means that the context is
    trained only through its own part of the features.

    Args:
        spec: the tasks; observations are vectors.
        num_experts: number of encoders ``z_k``, ``k`` in the paper; 6 for MT10, 10 for MT50.
        width: size of a hidden layer of encoders and context; 50 in the paper.
        depth: number of hidden layers of encoders and context; 2 in the paper.
        out_dim: features of an encoder, ``Z``; 50 in the paper.
        conditioning: task conditioning, the input of the context; in the paper a frozen embedding
            of the task's description.
        context_dim: size of the context, ``C``, equal to ``out_dim``.

    Raises:
        ConfigurationError: if observations are images, or ``context_dim`` differs from ``out_dim``.
    """

    context: TaskEncoder

    def __init__(
        self,
        spec: EnvSpec,
        *,
        num_experts: int = 6,
        width: int = 50,
        depth: int = 2,
        out_dim: int = 50,
        conditioning: Callable[[EnvSpec], TaskConditioning] = Language,
        context_dim: int = 50,
    ) -> None:
        super().__init__(spec)
        if context_dim != out_dim:
            raise ConfigurationError(
                f"context_dim is {context_dim} and out_dim {out_dim}: set them to the same number,"
                " because attention is the product of context and features"
            )
        self.experts = make_encoders(spec.observation_space, num_experts, width, depth, out_dim)
        self.context = TaskEncoder(
            spec, embedding=conditioning, width=width, depth=depth, out_dim=context_dim
        )
        self.out_dim = out_dim + context_dim

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, D]`` and ``[B]`` to ``[B, Z + C]``."""
        z_KBZ = self.experts(observation_BD)
        context_BC = self.context(task_B)
        attention_BK = torch.einsum("kbz,bz->bk", z_KBZ, context_BC.detach()).softmax(-1)
        z_BZ = torch.einsum("kbz,bk->bz", z_KBZ, attention_BK)
        return torch.cat([z_BZ, context_BC], dim=-1)
