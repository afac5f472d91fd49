"""What every auxiliary loss is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.encoder import Encoder
from mtrl_lightning.types import EnvSpec, TransitionBatch


class Auxiliary(nn.Module):
    """A loss that trains the encoder beside the critic's; built by a factory ``(spec, feature_dim) -> Auxiliary``.

    Args:
        spec: the tasks.
        feature_dim: features that the encoder gives.
        every: updates between two steps of this loss.
        learning_rate: of Adam, over the encoder's and this module's own parameters.
    """

    def __init__(
        self, spec: EnvSpec, feature_dim: int, *, every: int = 1, learning_rate: float = 1e-3
    ) -> None:
        super().__init__()
        if every < 1:
            raise ConfigurationError(
                f"an auxiliary's every is {every}: give a number of updates of at least 1"
            )
        self.every, self.learning_rate = every, learning_rate

    def loss(self, batch: TransitionBatch, encoder: Encoder) -> Tensor:
        """Return one loss a task, ``[T]``."""
        raise NotImplementedError

    def make_optimizer(self, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer over the encoder's and this module's parameters."""
        return torch.optim.Adam(parameters, lr=self.learning_rate)
