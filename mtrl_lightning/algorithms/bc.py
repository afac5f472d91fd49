"""Multi-task behaviour cloning: imitate the actions of demonstrations.

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks or ``R, n``, ``D``
observation, ``A`` action.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adam

from mtrl_lightning.algorithms.algorithm import Algorithm, compiled, make_actor_parts
from mtrl_lightning.algorithms.arguments import with_conditioning
from mtrl_lightning.checks import increasing, one_of
from mtrl_lightning.gradients import GradientMethod, Mean, per_task_forward
from mtrl_lightning.networks import (
    MLP,
    ClippedGaussian,
    Encoder,
    Identity,
    Network,
    OneHotCategorical,
    PolicyStd,
    SquashedGaussian,
    TaskConditioning,
    zero_padding,
)
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import POLICY_ACTION, TransitionBatch
from mtrl_lightning.updates.learning_rate import LearningRate
from mtrl_lightning.updates.weighting import EqualWeights, TaskWeighting

Loss = Literal["log_prob", "mse"]
Policy: TypeAlias = SquashedGaussian | ClippedGaussian | OneHotCategorical


def squared_errors(policy: Policy, action_BA: Tensor) -> Tensor:
    """Return the squared error of the deterministic action ``|mode - a|^2``, ``[B]``.

    For a clipped Gaussian, that of its mean before clipping: the clipped mean has no gradient
    beyond -1 and 1.
    """
    mean_BA = policy.mean_BA if isinstance(policy, ClippedGaussian) else policy.mode()
    return zero_padding((mean_BA - action_BA).square(), policy.mask_BA).sum(-1)


class BehaviourCloning(Algorithm):
    """Multi-task behaviour cloning: supervised learning of the actions in ``data.demonstrations``.

    An offline algorithm: training steps no environments. If the demonstrations were collected with
    action noise, it imitates the noise-free actions (``policy_action``), which show how to recover
    from mistakes (Laskey et al. 2017, arXiv 1703.09327). Its policy is SAC's tanh-squashed
    Gaussian or, with ``noise``, PPO's clipped Gaussian: encoder and actor then have the same
    parameters as in that algorithm.

    Args:
        spec: the tasks; filled in from the data.
        actor: network of the policy, ``(in_dim, out_dim, spec) -> Network``.
        encoder: maps observations to features of the actor, and is trained with it.
        conditioning: how the actor is conditioned on the task; None for the network's default, a
            one-hot task ID. A ``conditioning`` set on the network takes precedence.
        noise: the standard deviation of PPO's policy; null for SAC's policy, whose actor outputs
            its standard deviations.
        loss: ``mse``, the squared error of the deterministic action; or ``log_prob``, the negative
            log density of the demonstrated action, which also trains the standard deviations. For
            discrete actions, both are the cross-entropy.
        actor_gradient: how the tasks' losses are combined into one gradient.
        task_weighting: weight of each task's loss.
        learning_rate: schedule of the learning rate's factor over the run; None for a constant
            rate.
        log_std_min: lower clamp of the log standard deviation of SAC's policy.
        log_std_max: upper clamp of the log standard deviation of SAC's policy.
        actor_max_grad_norm: global norm to which the gradient is clipped; None for no clipping.
        actor_optimizer: optimizer of the actor, the encoder and the noise.
        options: arguments of ``Algorithm``, such as ``seed`` and ``compile``.
    """

    kind = "offline"
    encoder: Encoder
    actor: Network
    noise: PolicyStd
    actor_gradient: GradientMethod

    def __init__(
        self,
        spec: EnvSpec,
        *,
        actor: Callable[[int, int, EnvSpec], Network] = MLP,
        encoder: Callable[[EnvSpec], Encoder] = Identity,
        conditioning: Callable[[EnvSpec], TaskConditioning] | None = None,
        noise: Callable[[EnvSpec], PolicyStd] | None = None,
        loss: Loss = "mse",
        actor_gradient: Callable[[EnvSpec], GradientMethod] = Mean,
        task_weighting: Callable[[EnvSpec], TaskWeighting] = EqualWeights,
        learning_rate: Callable[[], LearningRate] | None = None,
        log_std_min: float = -5.0,
        log_std_max: float = 2.0,
        actor_max_grad_norm: float | None = 1.0,
        actor_optimizer: OptimizerCallable = lambda p: Adam(p, lr=1e-3, eps=1e-5, fused=True),
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        one_of(get_args(Loss), loss=loss)
        increasing(log_std_min=log_std_min, log_std_max=log_std_max)
        self.learning_rate = None if learning_rate is None else learning_rate()
        self._is_likelihood = loss == "log_prob" or spec.is_discrete
        self._log_std_min = log_std_min
        self._log_std_max = log_std_max
        self._make_actor = with_conditioning(actor, conditioning, spec)
        self._make_encoder = encoder
        self._make_noise = None if spec.is_discrete else noise
        self._make_actor_gradient = actor_gradient
        self.acting_networks = ("encoder", "actor", *(["noise"] if self._make_noise else []))
        self.add_networks()
        self.task_weighting = task_weighting(spec)
        self.task_weighting.check(None)
        self._actor_loss = compiled(self.actor_loss, self._compile)
        self.actor_update = self.make_update(
            "actor",
            list(self.acting_modules().values()),
            actor_optimizer,
            method=self.actor_gradient,
            max_grad_norm=actor_max_grad_norm,
            weights=self.task_weights,
        )

    def make_networks(self) -> dict[str, nn.Module]:
        """Build encoder, actor, the noise if any, and the gradient method."""
        encoder = self._make_encoder(self.spec)
        noise = self._make_noise(self.spec) if self._make_noise else None
        outputs_per_action = noise.outputs_per_action if noise else 2
        return make_actor_parts(
            self.spec,
            encoder,
            self._make_actor,
            self._make_actor_gradient,
            outputs_per_action,
            noise,
        )

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> Policy:
        """Return the distribution over actions."""
        return self._distribution(self._outputs(observation_BD, task_B), task_B)

    def update(self, batch: TransitionBatch) -> None:
        """Make one optimizer step on the imitation loss."""
        if self.learning_rate is not None:
            self.learning_rate.set(self.updates, self.progress)
        batch = self.transforms(batch)
        self.encoder.observe(batch.observation_RnD, batch.task_Rn)
        error = self.actor_update(lambda: self._actor_loss(batch))
        self.mean_metrics.add({"action_error": error})

    def actor_loss(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Return each task's loss ``[R]``, and the mean squared error of the actions."""
        output_RnO = per_task_forward(
            self.actor_gradient, self._outputs, 0, batch.observation_RnD, batch.task_Rn
        )
        policy = self._distribution(output_RnO, batch.task_Rn)
        # the demonstrator's choice, before noise was added to its action
        action_RnA = batch.extra.get(POLICY_ACTION, batch.action_RnA)
        error_Rn = squared_errors(policy, action_RnA)
        # of discrete actions, the negative log probability is the cross-entropy
        loss_Rn = -policy.log_prob(action_RnA) if self._is_likelihood else error_Rn
        return loss_Rn.mean(1), error_Rn.detach().mean()

    def task_weights(self) -> Tensor:
        """Return the weight of each trained task's loss, ``[R]``."""
        return self.task_weighting(torch.zeros(self.num_trained, device=self.device))

    def _outputs(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        output_BO: Tensor = self.actor(self.encoder(observation_BD, task_B), task_B)
        return output_BO

    def _distribution(self, output_BO: Tensor, task_B: Tensor) -> Policy:
        mask_BA = self.action_mask(task_B)
        if self.spec.is_discrete:
            return OneHotCategorical(output_BO, self.spec.action_choices, mask_BA)
        if self._make_noise is not None:
            return self.noise.distribution(output_BO, task_B)._replace(mask_BA=mask_BA)
        return SquashedGaussian.from_network(
            output_BO, self._log_std_min, self._log_std_max, mask_BA
        )
