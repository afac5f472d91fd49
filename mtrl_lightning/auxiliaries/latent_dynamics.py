"""DeepMDP: predict reward and next latent features from latent features and action.

Gelada et al. 2019, "DeepMDP: Learning Continuous Latent Space Models for Representation Learning"
(arXiv 1906.02736), as implemented for the comparison in Zhang et al. 2021 (DBC, arXiv 2006.10742).

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``A`` action, ``C`` context, ``I`` inputs of the
models, ``K`` members of an ensemble, ``Z`` latent features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from mtrl_lightning.auxiliaries.auxiliary import (
    AfterUpdate,
    Auxiliary,
    LossInputs,
    require_trained_encoder,
)
from mtrl_lightning.auxiliaries.transitions import (
    Deterministic,
    TransitionModel,
    hidden_layer,
)
from mtrl_lightning.checks import at_least, one_of
from mtrl_lightning.networks.encoder import Encoder
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch

RewardFrom = Literal["features", "next_features"]
"""Input of the reward model: features and action, or only the predicted next features."""


class LatentDynamics(Auxiliary):
    """Predict reward and next latent features (DeepMDP).

    With latent features ``z = phi(o)``, and ``mu`` and ``sigma`` of the transition model ``T``, the
    loss of a transition is the mean over the features of
    ``((mu - sg phi(o')) / sigma)^2 / 2 + log sigma``, plus ``(R - r)^2``. ``sg`` stops the
    gradient; ``r`` is the reward that the critic learns from. Inputs of both models are ``z``, the
    task's context if the encoder has one, and the action. An ensemble's loss is the mean over its
    members. One Adam trains the encoder and its context, another the models.

    Args:
        spec: the tasks.
        encoder: the encoder that the loss trains.
        transition: the transition model, ``(in_dim, latent_dim) -> TransitionModel``.
        width: size of the reward model's hidden layer; 512 in deep_bisim4control.
        reward_from: input of the reward model: ``features``, the input of ``T``, as in
            deep_bisim4control; ``next_features``, a sample of ``T``, as in mtrl.
        weight_decay: weight decay of the models, at least 0; 1e-7 in deep_bisim4control.
        after: the update that this step follows: ``critic`` as in deep_bisim4control, or
            ``targets`` as in mtrl.
        options: arguments of ``Auxiliary``.
    """

    def __init__(
        self,
        spec: EnvSpec,
        encoder: Encoder,
        *,
        transition: Callable[[int, int], TransitionModel] = Deterministic,
        width: int = 512,
        reward_from: RewardFrom = "features",
        weight_decay: float = 1e-7,
        after: AfterUpdate = "critic",
        **options: Any,
    ) -> None:
        super().__init__(spec, encoder, weight_decay=weight_decay, after=after, **options)
        require_trained_encoder(encoder, type(self).__name__)
        at_least(1, width=width)
        one_of(get_args(RewardFrom), reward_from=reward_from)
        latent_dim = encoder.latent_dim
        # the encoder's output size, which includes the context
        in_dim = encoder.out_dim + spec.action_space.shape[0]
        reward_dim = in_dim if reward_from == "features" else latent_dim
        self.transition = transition(in_dim, latent_dim)
        self.reward = nn.Sequential(*hidden_layer(reward_dim, width), nn.Linear(width, 1))
        self._reward_from = reward_from

    def loss(self, batch: TransitionBatch, inputs: LossInputs) -> Tensor:
        """Return one loss per trained task, ``[R]``."""
        z_RnZ = inputs.encoder.latent(batch.observation_RnD, batch.task_Rn)
        return self.model_loss(batch, inputs, z_RnZ)

    def model_loss(self, batch: TransitionBatch, inputs: LossInputs, z_RnZ: Tensor) -> Tensor:
        """Return each trained task's loss of both models, ``[R]``."""
        encoder = inputs.encoder
        with torch.no_grad():
            next_z_RnZ = encoder.latent(batch.next_observation_RnD, batch.task_Rn).float()
        context_RnC = None if encoder.context is None else encoder.context(batch.task_Rn)
        x_RnI = model_inputs(z_RnZ, context_RnC, batch.action_RnA)
        predicted = self.transition(x_RnI)
        error_KRnZ = predicted.mean_KRnZ - next_z_RnZ
        scaled_KRnZ = error_KRnZ / predicted.std_KRnZ
        transition_KRnZ = scaled_KRnZ.square() / 2 + predicted.std_KRnZ.log()
        if self._reward_from == "next_features":
            x_RnI = self.transition.draw(predicted, inputs.generator)
        reward_Rn = self.reward(x_RnI)[..., 0].float()
        reward_error_Rn = (reward_Rn - batch.reward_Rn).square()
        self._statistics = {
            "transition_error": error_KRnZ.detach().square().mean(),
            "reward_error": reward_error_Rn.detach().mean(),
        }
        return (transition_KRnZ.mean((0, -1)) + reward_error_Rn).mean(1)


def model_inputs(z_RnZ: Tensor, context_RnC: Tensor | None, action_RnA: Tensor) -> Tensor:
    """Return the input of the models, ``[R, n, I]``.

    The action comes last, because the actions of small bodies are padded with zeros at the end.
    """
    parts = (z_RnZ, context_RnC, action_RnA)
    return torch.cat([part.float() for part in parts if part is not None], dim=-1)
