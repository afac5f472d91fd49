"""What every auxiliary loss is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.encoder import Encoder
from mtrl_lightning.types import EnvSpec, TransitionBatch


class LossInputs(NamedTuple):
    """What an auxiliary loss is computed from, beside the batch."""

    encoder: Encoder
    """It is trained by the loss."""
    target_encoder: Encoder
    """Its moving average; it gets no gradient."""
    generator: torch.Generator
    """For draws, on the batch's device; this auxiliary's own, and saved with checkpoints."""


class Auxiliary(nn.Module):
    """A further loss of the encoder; built by a factory ``(spec, feature_dim) -> Auxiliary``.

    Modules that it has of its own, such as a decoder or a table of task contexts, are trained with
    the encoder and saved.

    Args:
        spec: the tasks.
        feature_dim: number of features that the encoder returns.
        every: critic updates between two steps of this loss, at least 1.
        learning_rate: of Adam, over the encoder's and this module's own parameters.

    Raises:
        ConfigurationError: if ``every`` is below 1.
    """

    def __init__(
        self, spec: EnvSpec, feature_dim: int, *, every: int = 1, learning_rate: float = 1e-3
    ) -> None:
        super().__init__()
        if every < 1:
            raise ConfigurationError(
                f"an auxiliary's every is {every}: give a number of updates of at least 1"
            )
        self.every = every
        self.learning_rate = learning_rate

    def loss(self, batch: TransitionBatch, inputs: LossInputs) -> Tensor:
        """Return one loss per trained task, ``[R]``."""
        raise NotImplementedError

    def make_optimizer(self, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer over the encoder's and this module's parameters."""
        return torch.optim.Adam(parameters, lr=self.learning_rate)
