"""HiP-BMDP: DeepMDP with a context per task, whose distances match those of the dynamics.

Zhang et al. 2021, "Learning Robust State Abstractions for Hidden-Parameter Block MDPs" (arXiv
2007.07206).

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``C`` context, ``I`` inputs of the models, ``K``
members of an ensemble, ``M`` tasks that a row's task is compared with, ``Z`` latent features.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mtrl_lightning.auxiliaries.auxiliary import LossInputs
from mtrl_lightning.auxiliaries.latent_dynamics import LatentDynamics, model_inputs
from mtrl_lightning.auxiliaries.transitions import Gaussians
from mtrl_lightning.checks import at_least, one_of
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.encoder import Encoder
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch

DistanceLoss = Literal["absolute", "squared"]
"""Penalty of the difference between two distances."""


class HiPBMDP(LatentDynamics):
    """Predict reward and next latent features given the task's context ``theta`` (HiP-BMDP).

    ``theta_i`` is the context that the encoder appends to its features for task ``i``, such as
    an MLP's output on a learned embedding (``encoder/mlp_context``). The loss is that of DeepMDP,
    with both models conditioned on ``theta_i``, plus ``distance_weight`` times the mean over other
    tasks ``j`` of, for each transition of task ``i`` with latent features ``z`` and action ``a``,

    - ``| ||theta_i - theta_j|| - W_2(T(z, a, theta_i), T(z, a, theta_j)) |``, as in the paper
      (``absolute``), or
    - ``( ||theta_i - theta_j|| - W_2(T(z, a, theta_i), T(z, a, theta_j)) )^2``, as in its code and
      in mtrl (``squared``).

    ``W_2^2 = ||mu_i - mu_j||^2 + ||sigma_i - sigma_j||^2`` for Gaussians. ``T`` and ``z`` are
    detached in this term, which trains only ``theta``. ``T`` predicts ``z'`` without the context.

    A task that is evaluated without being trained gets the ``theta`` of the mean of the trained
    tasks' embeddings (``untrained_tasks``).

    Args:
        spec: the tasks.
        encoder: the encoder that the loss trains; it must have a context.
        distance_weight: weight of the distance loss, at least 0; 0.01 in mtrl.
        distance_loss: ``absolute``, as in the paper, or ``squared``, as in its code and in mtrl.
        options: arguments of ``LatentDynamics``.
    """

    _task_R: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        encoder: Encoder,
        *,
        distance_weight: float = 0.01,
        distance_loss: DistanceLoss = "squared",
        **options: Any,
    ) -> None:
        _check_tasks(spec)
        _check_context(encoder)
        at_least(0, distance_weight=distance_weight)
        one_of(get_args(DistanceLoss), distance_loss=distance_loss)
        super().__init__(spec, encoder, **options)
        self._distance_weight = distance_weight
        self._distance_loss = distance_loss
        self.register_buffer("_task_R", torch.tensor(spec.train_tasks), persistent=False)

    def loss(self, batch: TransitionBatch, inputs: LossInputs) -> Tensor:
        """Return one loss per trained task, ``[R]``."""
        z_RnZ = inputs.encoder.latent(batch.observation_RnD, batch.task_Rn)
        model_loss_R = self.model_loss(batch, inputs, z_RnZ)
        difference_RnM = self._differences(batch, inputs, z_RnZ)
        if self._distance_loss == "squared":
            distance_loss_RnM = difference_RnM.square()
        else:
            distance_loss_RnM = difference_RnM.abs()
        return model_loss_R + self._distance_weight * distance_loss_RnM.mean(2).mean(1)

    def _differences(self, batch: TransitionBatch, inputs: LossInputs, z_RnZ: Tensor) -> Tensor:
        """Return distances of contexts minus distances of predictions, ``[R, n, M]``."""
        assert inputs.encoder.context is not None
        theta_RC = inputs.encoder.context(self._task_R).float()
        # as indices of trained tasks
        index_R = torch.arange(self.num_trained, device=self._task_R.device)
        own_Rn = index_R[:, None].expand(-1, z_RnZ.shape[1])
        other_RnM = (own_Rn[..., None] + index_R[1:]) % self.num_trained
        theta_RnC = theta_RC[own_Rn]
        other_theta_RnMC = theta_RC[other_RnM]
        distance_RnM = (theta_RnC[..., None, :] - other_theta_RnMC).norm(dim=-1)
        self._statistics["embedding_distance"] = distance_RnM.detach().mean()
        with torch.no_grad():
            prediction = self.transition(model_inputs(z_RnZ, theta_RnC, batch.action_RnA))
            predicted_distances = [
                wasserstein(
                    prediction,
                    self.transition(model_inputs(z_RnZ, other_theta_RnC, batch.action_RnA)),
                )
                for other_theta_RnC in other_theta_RnMC.unbind(2)
            ]
        return distance_RnM - torch.stack(predicted_distances, 2)


def wasserstein(one: Gaussians, other: Gaussians) -> Tensor:
    """Return ``W_2`` of two predictions, averaged over members, ``[R, n]``."""
    mean_KRn = (one.mean_KRnZ - other.mean_KRnZ).square().sum(-1)
    std_KRn = (one.std_KRnZ - other.std_KRnZ).square().sum(-1)
    return (mean_KRn + std_KRn).sqrt().mean(0)


def _check_tasks(spec: EnvSpec) -> None:
    if spec.num_trained < 2:
        raise ConfigurationError(
            f"HiPBMDP compares trained tasks, but only {spec.task_names[spec.train_tasks[0]]} is"
            " trained: train on at least two tasks, or choose LatentDynamics (-c algorithm/deepmdp)"
        )


def _check_context(encoder: Encoder) -> None:
    context = encoder.context
    if context is None:
        raise ConfigurationError(
            f"HiPBMDP needs an encoder with a context per task, but {type(encoder).__name__}"
            " has none: choose -c encoder/mlp_context for states or -c encoder/pixels_context for"
            " images (model.init_args.encoder.init_args.context)"
        )
    if not any(parameter.requires_grad for parameter in context.parameters()):
        raise ConfigurationError(
            f"HiPBMDP learns the tasks' context, but {type(context).__name__} has no parameters:"
            " set model.init_args.encoder.init_args.context to TaskEncoder or Embedding"
        )
