"""Base class of auxiliary losses.

Shapes: ``R`` trained tasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.checks import at_least, one_of
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.encoder import Encoder
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch

AfterUpdate = Literal["critic", "targets"]
"""An auxiliary's step follows the critics' update or, as the last step, the targets' update."""


class LossInputs(NamedTuple):
    """Inputs of an auxiliary loss, in addition to the batch."""

    encoder: Encoder
    """The online encoder, trained by the loss."""
    target_encoder: Encoder
    """Its moving average, without gradient."""
    generator: torch.Generator
    """This auxiliary's own random generator on the batch's device, saved in checkpoints."""


class Auxiliary(nn.Module):
    """An auxiliary loss of the encoder; built by a factory ``(spec, encoder) -> Auxiliary``.

    Its own submodules, such as a decoder, are trained together with the encoder and saved. Do not
    make the encoder a submodule: it is passed to ``loss``.

    Args:
        spec: the tasks.
        encoder: the encoder that the loss trains.
        every: critic updates per step of this loss, at least 1.
        learning_rate: Adam's learning rate for the encoder (including its context) and this
            module's own parameters; 1e-3 in SAC-AE, deep_bisim4control and mtrl.
        weight_decay: weight decay of this module's own parameters, at least 0.
        after: the update that this step follows: ``critic``, before the actor's update, or
            ``targets``, as the last step.
    """

    buffers_of_each_rank: tuple[str, ...] = ()
    """Names of buffers that differ between processes, because each has different rows."""

    def __init__(
        self,
        spec: EnvSpec,
        encoder: Encoder,
        *,
        every: int = 1,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.0,
        after: AfterUpdate = "targets",
    ) -> None:
        super().__init__()
        at_least(1, every=every)
        at_least(0, weight_decay=weight_decay)
        one_of(get_args(AfterUpdate), after=after)
        self.every = every
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.after = after
        self.num_trained = len(spec.train_tasks)
        self._statistics: dict[str, Tensor] = {}

    def loss(self, batch: TransitionBatch, inputs: LossInputs) -> Tensor:
        """Return one loss per trained task, ``[R]``."""
        raise NotImplementedError

    def metrics(self) -> dict[str, Tensor]:
        """Return statistics of the last loss as scalar tensors, logged as ``train/<name>``."""
        return self._statistics

    def images(self, encoder: Encoder) -> dict[str, npt.NDArray[np.uint8]]:
        """Return images ``[H, W, 3]`` by name that visualize the learned model; none by default."""
        return {}

    def make_optimizer(self, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer over the encoder's and this module's parameters.

        One Adam with two parameter groups, equivalent to two optimizers.
        """
        own = set(self.parameters())
        of_encoder = [parameter for parameter in parameters if parameter not in own]
        groups: list[dict[str, Any]] = [
            {"params": of_encoder},
            {"params": list(self.parameters()), "weight_decay": self.weight_decay},
        ]
        return torch.optim.Adam(groups, lr=self.learning_rate, fused=True)


def require_trained_encoder(encoder: Encoder, auxiliary: str) -> None:
    """Check that an encoder has trainable parameters."""
    if not any(parameter.requires_grad for parameter in encoder.parameters()):
        raise ConfigurationError(
            f"{auxiliary} trains the encoder, but {type(encoder).__name__} has no trainable"
            " parameters: choose another encoder (-c encoder/mlp for states, -c encoder/pixels for"
            " images)"
        )
