"""Base of off-policy algorithms with an actor and critics: networks, targets, updates, resets.

Shapes: ``T`` tasks, ``R`` trained tasks, ``n`` rows of a task in a batch, ``D`` observation, ``Z``
features, ``F`` features that the actor shares, ``A`` action, ``Q`` critics, ``O`` outputs of a
critic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adam

from mtrl_lightning.algorithms.algorithm import Algorithm, compiled, make_actor_parts
from mtrl_lightning.algorithms.arguments import with_conditioning
from mtrl_lightning.algorithms.losses import CriticTarget, Scalar, Value
from mtrl_lightning.auxiliaries import Auxiliary, LossInputs
from mtrl_lightning.auxiliaries.auxiliary import AfterUpdate
from mtrl_lightning.checks import at_least, within
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod, Mean, per_task_forward
from mtrl_lightning.networks import (
    MLP,
    Encoder,
    Ensemble,
    Identity,
    Network,
    TaskConditioning,
)
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.updates.targets import PolyakAverage, frozen_copy
from mtrl_lightning.updates.transforms import RewardScale, Transform
from mtrl_lightning.updates.weighting import EqualWeights, TaskWeighting


class ActorCritic(Algorithm):
    """Learn critics by temporal differences, and an actor from the critics.

    A subclass defines the policy (``policy``), how it learns (``actor_loss``, ``update_policy``),
    and the critics' target (``critic_target``).

    Args:
        spec: the tasks; filled in from the data.
        actor: network of the policy, ``(in_dim, out_dim, spec) -> Network``.
        critic: network of each Q function, likewise.
        encoder: maps observations to features of actor and critics; trained by the critic's loss.
        conditioning: how actor and critics are conditioned on the task; None for each network's
            default, a one-hot task ID. A ``conditioning`` set on a network takes precedence.
        actor_gradient: how the tasks' actor losses are combined into one gradient.
        critic_gradient: how the tasks' critic losses are combined into one gradient.
        value: interpretation of the critics' outputs, and their loss.
        task_weighting: weight of each task's actor and critic losses.
        reward_scale: normalizes the tasks' rewards to a common scale when they are sampled.
        transforms: transforms of sampled batches and observations, applied after ``reward_scale``.
        auxiliaries: auxiliary losses that train the encoder. If several have the same class, their
            metric names include the position in this list.
        num_critics: number of Q functions, ``Q``; at least 1. ``value`` determines how they are
            combined: ``Scalar`` takes the minimum.
        discount: gamma, between 0 and 1.
        tau: Polyak coefficient of the targets, ``target += tau (online - target)``, above 0 and at
            most 1.
        encoder_tau: Polyak coefficient of the target encoder; None to use ``tau``.
        actor_every: critic updates per actor (and temperature) update, at least 1.
        target_every: critic updates per target update, at least 1.
        actor_max_grad_norm: global norm to which the actor's gradient is clipped; None for no
            clipping.
        critic_max_grad_norm: the same for the critics and the encoder.
        actor_optimizer: optimizer of the actor.
        critic_optimizer: optimizer of the critics and the encoder.
        options: arguments of ``Algorithm``, such as ``seed`` and ``compile``.
    """

    acting_networks: tuple[str, ...] = ("encoder", "actor")
    outputs_per_action: int
    """Outputs of the actor for each dimension of an action."""
    targets: PolyakAverage
    encoder: Encoder
    actor: Network
    critic: Ensemble
    actor_gradient: GradientMethod
    critic_gradient: GradientMethod

    def __init__(
        self,
        spec: EnvSpec,
        *,
        actor: Callable[[int, int, EnvSpec], Network] = MLP,
        critic: Callable[[int, int, EnvSpec], Network] = MLP,
        encoder: Callable[[EnvSpec], Encoder] = Identity,
        conditioning: Callable[[EnvSpec], TaskConditioning] | None = None,
        actor_gradient: Callable[[EnvSpec], GradientMethod] = Mean,
        critic_gradient: Callable[[EnvSpec], GradientMethod] = Mean,
        value: Callable[[], Value] = Scalar,
        task_weighting: Callable[[EnvSpec], TaskWeighting] = EqualWeights,
        reward_scale: Callable[[EnvSpec], RewardScale] = RewardScale,
        transforms: list[Callable[[EnvSpec], Transform]] | None = None,
        auxiliaries: list[Callable[[EnvSpec, Encoder], Auxiliary]] | None = None,
        num_critics: int = 2,
        discount: float = 0.99,
        tau: float = 0.005,
        encoder_tau: float | None = None,
        actor_every: int = 1,
        target_every: int = 1,
        actor_max_grad_norm: float | None = 1.0,
        critic_max_grad_norm: float | None = 1.0,
        actor_optimizer: OptimizerCallable = lambda p: Adam(p, lr=3e-4, eps=1e-5, fused=True),
        critic_optimizer: OptimizerCallable = lambda p: Adam(p, lr=3e-4, eps=1e-5, fused=True),
        **options: Any,
    ) -> None:
        super().__init__(spec, **options)
        at_least(1, num_critics=num_critics, actor_every=actor_every, target_every=target_every)
        within(0, 1, discount=discount)
        within(0, 1, above_low=True, tau=tau)
        encoder_tau = tau if encoder_tau is None else encoder_tau
        within(0, 1, above_low=True, encoder_tau=encoder_tau, hint=", or null to use tau")
        self.discount = discount
        self.tau = tau
        self.actor_every = actor_every
        self.target_every = target_every
        self._make_actor = with_conditioning(actor, conditioning, spec)
        self._make_critic = with_conditioning(critic, conditioning, spec)
        self._make_encoder = encoder
        self._make_actor_gradient = actor_gradient
        self._make_critic_gradient = critic_gradient
        self._num_critics = num_critics
        self.value = value()
        if spec.is_discrete and not isinstance(self.value, Scalar):
            raise ConfigurationError(
                f"{type(self.value).__name__} takes continuous actions: set value to Scalar"
            )
        self.add_networks()
        # seeded separately, so that the networks' initial weights do not depend on the auxiliaries
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed + 1)
            parts = [make(spec, self.encoder) for make in auxiliaries or []]
        self.auxiliaries = nn.ModuleList(parts)
        self.generators.per_rank |= {f"auxiliary_{i}" for i in range(len(parts))}
        self.task_weighting = task_weighting(spec)
        self.target_encoder = frozen_copy(self.encoder)
        self.target_critic = frozen_copy(self.critic)
        self.targets = PolyakAverage(
            [self.critic, self.encoder],
            [self.target_critic, self.target_encoder],
            [tau, encoder_tau],
        )
        # no entropy bonus by default; SAC replaces these
        for name in ("temperature_T", "target_entropy_T"):
            self.transforms.quantities[name] = lambda: torch.zeros(
                spec.num_tasks, device=self.device
            )
        scale = reward_scale(spec)
        scale.check(discount)
        self.transforms.add(scale, self.generators)
        for make_transform in transforms or []:
            self.transforms.add(make_transform(spec), self.generators)

        self._critic_target = compiled(self.critic_target, self._compile)
        self._critic_loss = compiled(self.critic_loss, self._compile)
        self._actor_loss = compiled(self.actor_loss, self._compile)
        # the critic loss also trains the encoder; the actor loss receives detached features
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
            # the actor loss backpropagates through the critics without training them
            frozen=list(self.critic.parameters()),
            **self.actor_update_options(),
        )
        kinds = [type(part).__name__.lower() for part in parts]
        self._suffixes = [f"_{i}" if kinds.count(k) > 1 else "" for i, k in enumerate(kinds)]
        """Suffix of each auxiliary's metric names; not empty if several have the same class."""
        self.auxiliary_updates = [
            self.make_update(f"{kind}{suffix}", [self.encoder, part], part.make_optimizer)
            for kind, suffix, part in zip(kinds, self._suffixes, parts, strict=True)
        ]

    def make_networks(self) -> dict[str, nn.Module]:
        """Build encoder, actor, critics and both gradient methods."""
        encoder = self._make_encoder(self.spec)
        make_actor = partial(encoder.make_actor, self._make_actor)
        # a critic of discrete actions gives each of them a value
        critic_sizes = (
            (encoder.out_dim, self.action_dim, self.spec)
            if self.spec.is_discrete
            else (encoder.out_dim + self.action_dim, self.value.out_dim, self.spec)
        )
        return {
            **make_actor_parts(
                self.spec,
                encoder,
                partial(self.make_task_network, make_actor),
                self._make_actor_gradient,
                self.outputs_per_action,
            ),
            "critic": Ensemble(
                lambda: self.make_task_network(self._make_critic, *critic_sizes),
                self._num_critics,
            ),
            "critic_gradient": self._make_critic_gradient(self.spec),
        }

    def make_task_network(
        self, make: Callable[[int, int, EnvSpec], Network], in_dim: int, out_dim: int, spec: EnvSpec
    ) -> Network:
        """Build a network of all tasks: the actor, or one critic."""
        return make(in_dim, out_dim, spec)

    def critic_update_options(self) -> dict[str, Any]:
        """Return the options of the critics' ``Update``."""
        return {"method": self.critic_gradient, "weights": self.task_weights}

    def actor_update_options(self) -> dict[str, Any]:
        """Return the options of the actor's ``Update``."""
        return {"method": self.actor_gradient, "weights": self.task_weights}

    def update(self, batch: TransitionBatch) -> None:
        """Update the critics, and auxiliaries, actor and targets if they are due."""
        batch = self.transforms(batch)
        if self.encoder.observe(batch.observation_RnD, batch.task_Rn):
            self.targets.copy_buffers()  # the target encoder needs the new statistics below

        # critics and encoder: minimize the error to the bootstrapped target
        target = self._critic_target(batch, self.generators.normal_like("learn", batch.action_RnA))
        q = self.critic_update(lambda: self._critic_loss(batch, target))
        self.mean_metrics.add({"q": q})
        self._update_auxiliaries("critic", batch)

        # after the critics, which in the actor's loss only pass gradients on to its actions
        if self.counters.updates % self.actor_every == 0:
            self.update_policy(batch)

        # targets: theta' <- (1 - tau) theta' + tau theta
        if self.counters.updates % self.target_every == 0:
            self.targets.step()
        self._update_auxiliaries("targets", batch)

    def update_policy(self, batch: TransitionBatch) -> None:
        """Update the actor, and modules that depend on its actions, from a transformed batch."""
        raise NotImplementedError

    def critic_target(self, batch: TransitionBatch, noise_RnA: Tensor) -> CriticTarget:
        """Return the bootstrap of the critics' loss, for the policy's next actions."""
        raise NotImplementedError

    actor_loss: Callable[..., tuple[Tensor, Any]]
    """Returns each task's actor loss ``[R]``, and extra results for ``update_policy``."""

    def target_outputs(self, batch: TransitionBatch, action_RnA: Tensor) -> Tensor:
        """Return the target critics' outputs ``[Q, R, n, O]`` for the policy's next actions."""
        return self._critic_outputs(
            self.target_critic,
            self.target_encoder,
            batch.next_observation_RnD,
            action_RnA,
            batch.task_Rn,
            of_policy=True,
        )

    def critic_loss(self, batch: TransitionBatch, target: CriticTarget) -> tuple[Tensor, Tensor]:
        """Return each task's critic loss ``[R]``, and the mean Q value."""
        # the tasks are in dimension 1 of the outputs [Q, R, n, O]
        output_QRnO = per_task_forward(
            self.critic_gradient,
            partial(self._critic_outputs, self.critic, self.encoder),
            1,
            batch.observation_RnD,
            batch.action_RnA,
            batch.task_Rn,
        )
        # y = r + discount (1 - terminated) (Q'(s', a') - cost), with the reduction of the value
        loss_R = self.value.loss(output_QRnO, target, batch, self.discount)
        return loss_R, self.value.q(output_QRnO.detach()).mean()

    def actor_outputs(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """Return the actor's outputs ``[R, n, ...]``, and the detached features."""
        with torch.no_grad():  # only critics and auxiliaries train the encoder
            shared_RnF = self.encoder.shared_features(batch.observation_RnD, batch.task_Rn)
            z_RnZ = self.encoder.project(shared_RnF)
        return per_task_forward(
            self.actor_gradient, self.actor, 0, shared_RnF, batch.task_Rn
        ), z_RnZ

    def critic_outputs_of(self, z_RnZ: Tensor, action_RnA: Tensor, task_Rn: Tensor) -> Tensor:
        """Return the critics' outputs ``[Q, R, n, O]`` for encoded features."""
        # already encoded: the identity replaces the encoder
        critic_of_features = partial(
            self._critic_outputs, self.critic, lambda z_RnZ, task_Rn: z_RnZ, of_policy=True
        )
        return per_task_forward(
            self.actor_gradient, critic_of_features, 1, z_RnZ, action_RnA, task_Rn
        )

    def task_weights(self) -> Tensor:
        """Return the weight of each trained task's losses, ``[R]``."""
        return self.task_weighting(self.log_temperatures())

    def log_temperatures(self) -> Tensor:
        """Return the trained tasks' log temperatures ``[R]``; zeros without an entropy bonus."""
        return torch.zeros(self.num_trained, device=self.device)

    def images(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Return the auxiliaries' images ``[H, W, 3]`` by name."""
        found: dict[str, npt.NDArray[np.uint8]] = {}
        for auxiliary, suffix in zip(self.auxiliaries, self._suffixes, strict=True):
            assert isinstance(auxiliary, Auxiliary)
            images = auxiliary.images(self.encoder)
            found |= {f"{name}{suffix}": image for name, image in images.items()}
        return found

    def _critic_outputs(
        self,
        critic: Ensemble,
        encoder: Callable[..., Tensor],
        observation_RnD: Tensor,
        action_RnA: Tensor,
        task_Rn: Tensor,
        of_policy: bool = False,
    ) -> Tensor:
        z_RnZ = encoder(observation_RnD, task_Rn)
        if self.spec.is_discrete:
            # [Q, R, n, A]: the value of the action taken; or of the policy, whose probabilities
            # weigh the smallest value of each action (Christodoulou 2019, equations 10 and 12)
            q_QRnA = critic(z_RnZ, task_Rn).float()
            if of_policy:
                q_QRnA = self.value.q(q_QRnA[..., None]).amin(0, keepdim=True)
            return (q_QRnA * action_RnA).sum(-1, keepdim=True)
        # single precision even under autocast: targets and errors are differences of values
        return critic(torch.cat([z_RnZ, action_RnA], dim=-1), task_Rn).float()

    def _update_auxiliaries(self, after: AfterUpdate, batch: TransitionBatch) -> None:
        """Update the auxiliaries that follow the critics or the targets, if they are due."""
        for i, auxiliary in enumerate(self.auxiliaries):
            assert isinstance(auxiliary, Auxiliary)
            if auxiliary.after == after and self.counters.updates % auxiliary.every == 0:
                self._update_auxiliary(i, auxiliary, batch)

    def _update_auxiliary(self, i: int, auxiliary: Auxiliary, batch: TransitionBatch) -> None:
        generator = self.generators.get(f"auxiliary_{i}", self.device)
        inputs = LossInputs(self.encoder, self.target_encoder, generator)
        self.auxiliary_updates[i](lambda: (auxiliary.loss(batch, inputs), None))
        metrics = auxiliary.metrics()
        self.mean_metrics.add({f"{name}{self._suffixes[i]}": v for name, v in metrics.items()})
