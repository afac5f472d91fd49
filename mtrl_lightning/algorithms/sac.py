"""Multi-task soft actor-critic.

Shapes: ``T`` tasks, ``R`` trained tasks, ``B = R * n`` batch (task-major), ``D`` observation, ``Z``
features, ``F`` features that the actor shares, ``A`` action, ``Q`` critics, ``O`` outputs of a
critic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.spaces import Box
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adam

from mtrl_lightning.algorithms import losses
from mtrl_lightning.algorithms.algorithm import Algorithm
from mtrl_lightning.algorithms.checks import check_parts
from mtrl_lightning.algorithms.reward_scale import RewardScale
from mtrl_lightning.algorithms.targets import PolyakAverage, frozen_copy
from mtrl_lightning.algorithms.task_rows import task_by_task
from mtrl_lightning.algorithms.temperature import Temperature
from mtrl_lightning.algorithms.transforms import Transform
from mtrl_lightning.algorithms.update import Update
from mtrl_lightning.algorithms.values import Scalar, Value
from mtrl_lightning.algorithms.weighting import EqualWeights, TaskWeighting
from mtrl_lightning.auxiliaries import Auxiliary, LossInputs
from mtrl_lightning.auxiliaries.auxiliary import AfterUpdate
from mtrl_lightning.checks import at_least, increasing, within
from mtrl_lightning.gradients import GradientMethod, Mean
from mtrl_lightning.networks import (
    MLP,
    Encoder,
    Ensemble,
    Identity,
    Network,
    SquashedGaussian,
    TaskConditioning,
    with_conditioning,
    with_projection,
)
from mtrl_lightning.types import EnvSpec, TransitionBatch


class CriticTarget(NamedTuple):
    """What the critics' loss bootstraps from; without a graph."""

    next_output_QBO: Tensor
    """Outputs of the target critics for the policy's next actions."""
    next_cost_B: Tensor
    """What the policy pays for these actions: see ``SAC.action_cost``."""


class SAC(Algorithm):
    """Multi-task soft actor-critic; the defaults are MetaWorld+'s (McLean et al. 2025).

    Args:
        spec: the tasks; filled in from the data.
        actor: network of the policy, ``(in_dim, out_dim, num_tasks) -> Network``.
        critic: network of each Q function, likewise.
        encoder: maps observations to what actor and critics see; trained by the critic's loss.
        conditioning: how the task is given to actor and critics; None for each network's own, the
            one-hot. A ``conditioning`` among a network's options takes precedence.
        actor_gradient: how the tasks' actor losses become one gradient.
        critic_gradient: how the tasks' critic losses become one gradient.
        value: what a critic's outputs mean, and how it learns.
        task_weighting: how much each task's losses of actor and critic count.
        reward_scale: brings the tasks' rewards to one scale when they are sampled.
        transforms: further changes of sampled batches and of observations, after the reward scale.
        temperature: weight of the entropy, learned or fixed.
        auxiliaries: further losses that train the encoder.
        num_critics: Q functions of which the smallest counts, ``Q``; at least 1.
        discount: gamma, between 0 and 1.
        tau: how far the targets move at each of their updates, above 0 and at most 1.
        encoder_tau: the same for the target encoder; None for ``tau``.
        target_entropy: entropy that the temperature aims at, for every task; None for minus the
            task's own number of action dimensions.
        log_std_min: lower clamp of the policy's log standard deviation.
        log_std_max: upper clamp of the policy's log standard deviation.
        actor_every: critic updates between two actor (and temperature) updates, at least 1.
        target_every: critic updates between two target updates, at least 1.
        actor_max_grad_norm: global norm to which the actor's gradient is clipped; None for no
            clipping.
        critic_max_grad_norm: the same for the critics and the encoder.
        actor_optimizer: optimizer of the actor.
        critic_optimizer: optimizer of the critics and the encoder.
        temperature_optimizer: optimizer of the temperature.
        options: those of every algorithm: ``seed``, ``compile`` and others of ``Algorithm``.
    """

    acting_networks: tuple[str, ...] = ("encoder", "actor")
    encoder: Encoder
    actor: Network
    critic: Ensemble
    actor_gradient: GradientMethod
    critic_gradient: GradientMethod
    target_entropy_T: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        *,
        actor: Callable[[int, int, int], Network] = MLP,
        critic: Callable[[int, int, int], Network] = MLP,
        encoder: Callable[[Box, int], Encoder] = Identity,
        conditioning: Callable[[int], TaskConditioning] | None = None,
        actor_gradient: Callable[[int], GradientMethod] = Mean,
        critic_gradient: Callable[[int], GradientMethod] = Mean,
        value: Callable[[], Value] = Scalar,
        task_weighting: Callable[[EnvSpec], TaskWeighting] = EqualWeights,
        reward_scale: Callable[[EnvSpec], RewardScale] = RewardScale,
        transforms: list[Callable[[EnvSpec], Transform]] | None = None,
        temperature: Callable[[int], Temperature] = Temperature,
        auxiliaries: list[Callable[[EnvSpec, Encoder], Auxiliary]] | None = None,
        num_critics: int = 2,
        discount: float = 0.99,
        tau: float = 0.005,
        encoder_tau: float | None = None,
        target_entropy: float | None = None,
        log_std_min: float = -20.0,
        log_std_max: float = 2.0,
        actor_every: int = 1,
        target_every: int = 1,
        actor_max_grad_norm: float | None = 1.0,
        critic_max_grad_norm: float | None = 1.0,
        actor_optimizer: OptimizerCallable = lambda p: Adam(p, lr=3e-4, eps=1e-5, fused=True),
        critic_optimizer: OptimizerCallable = lambda p: Adam(p, lr=3e-4, eps=1e-5, fused=True),
        temperature_optimizer: OptimizerCallable = lambda p: Adam(p, lr=3e-4, eps=1e-5, fused=True),
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        at_least(1, num_critics=num_critics, actor_every=actor_every, target_every=target_every)
        within(0, 1, discount=discount)
        within(0, 1, above_low=True, tau=tau)
        increasing(log_std_min=log_std_min, log_std_max=log_std_max)
        encoder_tau = tau if encoder_tau is None else encoder_tau
        within(0, 1, above_low=True, encoder_tau=encoder_tau, hint=", or null for tau's")
        self.discount = discount
        self.actor_every = actor_every
        self.target_every = target_every
        self._log_std_min = log_std_min
        self._log_std_max = log_std_max
        self._make_actor = with_conditioning(actor, conditioning, spec.num_tasks)
        self._make_critic = with_conditioning(critic, conditioning, spec.num_tasks)
        self._make_encoder = encoder
        self._make_actor_gradient = actor_gradient
        self._make_critic_gradient = critic_gradient
        self._num_critics = num_critics
        self.value = value()
        self.add_networks()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed + 1)
            self.auxiliaries = nn.ModuleList(make(spec, self.encoder) for make in auxiliaries or [])
        self.generators.per_rank |= {f"auxiliary_{i}" for i in range(len(self.auxiliaries))}
        self.temperature = temperature(spec.num_tasks)
        self.task_weighting = task_weighting(spec)
        self.target_encoder = frozen_copy(self.encoder)
        self.target_critic = frozen_copy(self.critic)
        self.targets = PolyakAverage(
            [self.critic, self.encoder],
            [self.target_critic, self.target_encoder],
            [tau, encoder_tau],
        )
        if target_entropy is None:
            target_entropy_T = -torch.from_numpy(spec.action_mask_TA.sum(1)).float()
        else:
            target_entropy_T = torch.full((spec.num_tasks,), float(target_entropy))
        self.register_buffer("target_entropy_T", target_entropy_T, persistent=False)
        self.quantities = {
            "temperature_T": self.temperature.values,
            "target_entropy_T": lambda: self.target_entropy_T,
        }
        scale = reward_scale(spec)
        check_parts(self.task_weighting, self.temperature, scale, discount)
        self.add_transform(scale)
        for make_transform in transforms or []:
            self.add_transform(make_transform(spec))

        self._critic_target = self.compiled(self.critic_target)
        self._critic_loss = self.compiled(self.critic_loss)
        self._actor_loss = self.compiled(self.actor_loss)
        self.critic_update = self.make_update(
            "critic",
            [self.encoder, *self.critic.members],
            critic_optimizer,
            max_grad_norm=critic_max_grad_norm,
            **self.critic_update_options(),
        )
        self.actor_update = self.make_update(
            "actor",
            [self.actor],
            actor_optimizer,
            max_grad_norm=actor_max_grad_norm,
            frozen=list(self.critic.parameters()),
            **self.actor_update_options(),
        )
        self.temperature_update: Update | None = None
        if self.temperature.is_learned:
            self.temperature_update = self.make_update(
                "temperature", [self.temperature], temperature_optimizer
            )
        self.auxiliary_updates = [self._auxiliary_update(part) for part in self.auxiliaries]

    def make_networks(self) -> dict[str, nn.Module]:
        """Build encoder, actor, critics and both gradient methods."""
        encoder = self._make_encoder(self.spec.observation_space, self.spec.num_tasks)
        actor_sizes = (encoder.out_dim, 2 * self.action_dim)
        critic_sizes = (encoder.out_dim + self.action_dim, self.value.out_dim)
        return {
            "encoder": encoder,
            "actor": self.make_task_network(partial(self.make_policy, encoder), *actor_sizes),
            "critic": Ensemble(
                lambda: self.make_task_network(self._make_critic, *critic_sizes),
                self._num_critics,
            ),
            "actor_gradient": self._make_actor_gradient(self.num_trained),
            "critic_gradient": self._make_critic_gradient(self.num_trained),
        }

    def make_policy(self, encoder: Encoder, in_dim: int, out_dim: int, num_tasks: int) -> Network:
        """Build a network of the features that the actor shares with the critics."""
        assert in_dim == encoder.out_dim
        return with_projection(self._make_actor, encoder, out_dim, num_tasks)

    def make_task_network(
        self, make: Callable[[int, int, int], Network], in_dim: int, out_dim: int
    ) -> Network:
        """Build a network of all tasks: the actor, or one critic."""
        return make(in_dim, out_dim, self.spec.num_tasks)

    def critic_update_options(self) -> dict[str, Any]:
        """Return how the tasks' critic losses become one gradient: options of ``Update``."""
        return {"method": self.critic_gradient, "weights": self.task_weights}

    def actor_update_options(self) -> dict[str, Any]:
        """Return how the tasks' actor losses become one gradient: options of ``Update``."""
        return {"method": self.actor_gradient, "weights": self.task_weights}

    def update(self, batch: TransitionBatch) -> None:
        """Update the critics, and auxiliaries, actor, temperature and targets if they are due."""
        batch = self.transform(batch)
        if self.encoder.observe(batch.observation_BD, batch.task_B):
            self.targets.copy_buffers()

        target = self._critic_target(batch, self.noise_like(batch.action_BA))
        q = self.critic_update(lambda: self._critic_loss(batch, target))
        self.mean_metrics.add({"q": q})
        self._update_auxiliaries("critic", batch)

        if self.is_due(self.actor_every):
            self.update_policy(batch)

        if self.is_due(self.target_every):
            self.targets.step()
        self._update_auxiliaries("targets", batch)

    def update_policy(self, batch: TransitionBatch) -> None:
        """Update the actor and then the temperature, from a transformed batch."""
        noise_BA = self.noise_like(batch.action_BA)
        log_prob_B = self.actor_update(lambda: self._actor_loss(batch, noise_BA))
        if self.temperature_update is not None:
            self.temperature_update(lambda: self.temperature_loss(log_prob_B, batch.task_B))
        self.mean_metrics.add({"entropy": -log_prob_B.mean()})

    @torch.no_grad()
    def critic_target(self, batch: TransitionBatch, noise_BA: Tensor) -> CriticTarget:
        """Return what the critics' loss bootstraps from, for the policy's next actions."""
        policy = self.policy(batch.next_observation_BD, batch.task_B)
        action_BA, log_prob_B = policy.sample(noise_BA)
        cost_B = self.action_cost(
            policy, noise_BA, log_prob_B, batch.next_observation_BD, batch.task_B
        )
        output_QBO = self._critic_outputs(
            self.target_critic,
            self.target_encoder,
            batch.next_observation_BD,
            action_BA,
            batch.task_B,
        )
        return CriticTarget(output_QBO, cost_B)

    def action_cost(
        self,
        policy: SquashedGaussian,
        noise_BA: Tensor,
        log_prob_B: Tensor,
        observation_BD: Tensor,
        task_B: Tensor,
    ) -> Tensor:
        """Return what the policy pays for its actions, ``alpha log pi``, ``[B]``.

        Critics' targets and the actor's loss subtract it from the actions' values.

        Args:
            policy: distribution over actions for the observations.
            noise_BA: noise from which the actions were sampled.
            log_prob_B: log densities of the actions.
            observation_BD: observations.
            task_B: tasks.
        """
        with torch.no_grad():
            alpha_B = self.temperature(task_B).exp()
        return alpha_B * log_prob_B

    def critic_loss(self, batch: TransitionBatch, target: CriticTarget) -> tuple[Tensor, Tensor]:
        """Return each task's critic loss ``[R]``, and the mean Q value."""
        output_QBO = task_by_task(
            self.critic_gradient,
            partial(self._critic_outputs, self.critic, self.encoder),
            1,
            batch.observation_BD,
            batch.action_BA,
            batch.task_B,
        )
        loss_R = self.value.loss(
            output_QBO,
            target.next_output_QBO,
            batch.reward_B,
            batch.terminated_B,
            target.next_cost_B,
            self.discount,
            self.num_trained,
        )
        return loss_R, self.value.q(output_QBO.detach()).mean()

    def actor_loss(self, batch: TransitionBatch, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return each task's actor loss ``[R]``, and the actions' log densities ``[B]``."""
        with torch.no_grad():
            shared_BF = self.encoder.shared_features(batch.observation_BD, batch.task_B)
            z_BZ = self.encoder.project(shared_BF)
        output_B2A = task_by_task(self.actor_gradient, self.actor, 0, shared_BF, batch.task_B)
        policy = self._distribution(output_B2A, batch.task_B)
        action_BA, log_prob_B = policy.sample(noise_BA)
        cost_B = self.action_cost(policy, noise_BA, log_prob_B, batch.observation_BD, batch.task_B)
        critic_of_features = partial(self._critic_outputs, self.critic, lambda z_BZ, task_B: z_BZ)
        output_QBO = task_by_task(
            self.actor_gradient, critic_of_features, 1, z_BZ, action_BA, batch.task_B
        )
        q_QB = self.value.q(output_QBO)
        return losses.actor_loss(cost_B, q_QB, self.num_trained), log_prob_B.detach()

    def temperature_loss(self, log_prob_B: Tensor, task_B: Tensor) -> tuple[Tensor, None]:
        """Return each task's temperature loss ``[R]``."""
        log_alpha_B = self.temperature(task_B)
        target_entropy_B = self.target_entropy_T[task_B]
        loss_R = losses.temperature_loss(
            log_alpha_B, log_prob_B, target_entropy_B, self.num_trained
        )
        return loss_R, None

    def task_weights(self) -> Tensor:
        """Return how much each trained task's losses count, ``[R]``."""
        return self.task_weighting(self.temperature(self._task_R))

    def policy(self, observation_BD: Tensor, task_B: Tensor) -> SquashedGaussian:
        """Return the distribution over actions."""
        output_B2A = self.actor(self.encoder.shared_features(observation_BD, task_B), task_B)
        return self._distribution(output_B2A, task_B)

    def reset_networks(self) -> None:
        """Reinitialize actor, critics and encoder, their optimizers and gradient methods.

        Buffers (an encoder's statistics), the temperatures and the auxiliaries stay.
        """
        super().reset_networks()
        self.targets.copy_parameters()

    def drain_metrics(self) -> dict[str, float]:
        """Return ``train/...`` metrics since the last call, and the learned temperatures now."""
        metrics = super().drain_metrics()
        if not metrics or not self.temperature.is_learned:
            return metrics
        alphas = self.temperature.values().tolist()
        for task in self.spec.train_tasks:
            metrics[f"train/temperature/{self.spec.task_names[task]}"] = alphas[task]
        return metrics

    def pictures(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Return the auxiliaries' pictures ``[H, W, 3]`` by name."""
        found: dict[str, npt.NDArray[np.uint8]] = {}
        for auxiliary in self.auxiliaries:
            assert isinstance(auxiliary, Auxiliary)
            found |= auxiliary.pictures(self.encoder)
        return found

    def _distribution(self, output_B2A: Tensor, task_B: Tensor) -> SquashedGaussian:
        return SquashedGaussian.from_network(
            output_B2A, self._log_std_min, self._log_std_max, self.action_mask(task_B)
        )

    def _critic_outputs(
        self,
        critic: Ensemble,
        encoder: Callable[..., Tensor],
        observation_BD: Tensor,
        action_BA: Tensor,
        task_B: Tensor,
    ) -> Tensor:
        z_BZ = encoder(observation_BD, task_B)
        return critic(torch.cat([z_BZ, action_BA], dim=-1), task_B).float()

    def _auxiliary_update(self, auxiliary: nn.Module) -> Update:
        assert isinstance(auxiliary, Auxiliary)
        name = type(auxiliary).__name__.lower()
        return self.make_update(name, [self.encoder, auxiliary], auxiliary.make_optimizer)

    def _update_auxiliaries(self, after: AfterUpdate, batch: TransitionBatch) -> None:
        """Update the auxiliaries that follow the critics or the targets, if they are due."""
        for i, auxiliary in enumerate(self.auxiliaries):
            assert isinstance(auxiliary, Auxiliary)
            if auxiliary.after == after and self.is_due(auxiliary.every):
                self._update_auxiliary(i, auxiliary, batch)

    def _update_auxiliary(self, i: int, auxiliary: Auxiliary, batch: TransitionBatch) -> None:
        generator = self.generators.get(f"auxiliary_{i}", self.device)
        inputs = LossInputs(self.encoder, self.target_encoder, generator)
        self.auxiliary_updates[i](lambda: (auxiliary.loss(batch, inputs), None))
        self.mean_metrics.add(auxiliary.metrics())
