"""Multi-task soft actor-critic.

Shapes: ``T`` trained tasks, ``B = T * n`` batch (task-major), ``D`` observation, ``Z`` features,
``A`` action, ``Q`` critics, ``E`` environments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.spaces import Box
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mtrl_lightning.algorithms import losses
from mtrl_lightning.algorithms.algorithm import Algorithm
from mtrl_lightning.algorithms.checks import check_parts, check_ranges
from mtrl_lightning.algorithms.compiling import Compile, begin_graphs, check_compile, compiled
from mtrl_lightning.algorithms.descent import Descent, without_gradients
from mtrl_lightning.algorithms.reward_scale import RewardScale
from mtrl_lightning.algorithms.targets import PolyakAverage, assign_parameters, frozen_copy
from mtrl_lightning.algorithms.task_rows import task_by_task
from mtrl_lightning.algorithms.temperature import Temperature
from mtrl_lightning.algorithms.values import Scalar, Value
from mtrl_lightning.algorithms.weighting import EqualWeights, TaskWeighting
from mtrl_lightning.auxiliaries import Auxiliary
from mtrl_lightning.gradients import GradientMethod, Mean
from mtrl_lightning.memory import CPU, to_device
from mtrl_lightning.networks import (
    MLP,
    Encoder,
    Ensemble,
    Identity,
    Network,
    SquashedGaussian,
    TaskConditioning,
    set_task_names,
    with_conditioning,
)
from mtrl_lightning.types import EnvSpec, Mode, TransitionBatch


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
        temperature: weight of the entropy.
        auxiliaries: further losses that train the encoder.
        num_critics: Q functions of which the smallest counts, ``Q``.
        discount: gamma.
        tau: how far the targets move at each of their updates.
        target_entropy: entropy that the temperature aims at; None for minus the number of action
            dimensions.
        log_std_min: lower clamp of the policy's log standard deviation.
        log_std_max: upper clamp of the policy's log standard deviation.
        actor_every: critic updates between two actor (and temperature) updates.
        target_every: critic updates between two target updates.
        actor_max_grad_norm: global norm to which the actor's gradient is clipped; None for no
            clipping.
        critic_max_grad_norm: the same for the critics and the encoder.
        actor_optimizer: optimizer of the actor.
        critic_optimizer: optimizer of the critics and the encoder.
        temperature_optimizer: optimizer of the temperature.
        compile: ``default`` compiles the losses with ``torch.compile``, ``cudagraphs`` also
            launches them as CUDA graphs; meant for a GPU, slower on a CPU. The first updates wait
            for the compiler.
        seed: of the weights and of all draws.

    Raises:
        ConfigurationError: if a number is out of its range.
    """

    _task_T: Tensor

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
        temperature: Callable[[int], Temperature] = Temperature,
        auxiliaries: list[Callable[[EnvSpec, int], Auxiliary]] | None = None,
        num_critics: int = 2,
        discount: float = 0.99,
        tau: float = 0.005,
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
        compile: Compile = "none",
        seed: int = 0,
    ) -> None:
        super().__init__(spec, seed)
        warnings.filterwarnings(
            "ignore", ".*removed from hparams"
        )  # factories given in Python are not saved
        self.save_hyperparameters(ignore=["spec"])
        check_ranges(
            num_critics, discount, tau, actor_every, target_every, log_std_min, log_std_max
        )
        self.discount, self.action_dim = discount, spec.action_space.shape[0]
        self.target_entropy = -float(self.action_dim) if target_entropy is None else target_entropy
        self._log_std, self.actor_every, self.target_every = (
            (log_std_min, log_std_max),
            actor_every,
            target_every,
        )
        self._optimizers = (critic_optimizer, actor_optimizer, temperature_optimizer)
        self._num_trained = len(spec.train_tasks)
        self.register_buffer("_task_T", torch.tensor(spec.train_tasks), persistent=False)

        self.value = value()
        actor = with_conditioning(actor, conditioning, spec.num_tasks)
        critic = with_conditioning(critic, conditioning, spec.num_tasks)
        self._make = (encoder, actor, lambda *sizes: Ensemble(lambda: critic(*sizes), num_critics))
        self._make_gradients = (actor_gradient, critic_gradient)
        self.encoder, self.actor, self.critic, self.actor_gradient, self.critic_gradient = (
            self._new_networks(seed)
        )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed + 1)
            self.auxiliaries = nn.ModuleList(
                make(spec, self.encoder.out_dim) for make in auxiliaries or []
            )
        self.temperature = temperature(spec.num_tasks)
        self.task_weighting, self.reward_scale = task_weighting(spec), reward_scale(spec)
        self.target_encoder, self.target_critic = (
            frozen_copy(self.encoder),
            frozen_copy(self.critic),
        )
        self._targets = PolyakAverage(
            [self.critic, self.encoder], [self.target_critic, self.target_encoder], tau
        )
        check_parts(self.task_weighting, self.temperature, self.reward_scale, discount)
        self._descents = {
            "critic": Descent(
                self.critic_gradient, self.critic.members, self.encoder, critic_max_grad_norm
            ),
            "actor": Descent(self.actor_gradient, [self.actor], None, actor_max_grad_norm),
        }
        self._critic_parameters = [p for p in self.critic.parameters() if p.requires_grad]
        self._compile, self._compiled_critic_losses = (
            compile,
            compiled(self._critic_losses, compile),
        )
        self._compiled_actor_losses = compiled(self._actor_losses, compile)

    def _new_networks(
        self, seed: int
    ) -> tuple[Encoder, Network, Ensemble, GradientMethod, GradientMethod]:
        """Build what is trained with weights of this seed."""
        make_encoder, make_actor, make_critic = self._make
        T, A = self.spec.num_tasks, self.action_dim
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            encoder = make_encoder(self.spec.observation_space, T)
            Z = encoder.out_dim
            actor, critic = make_actor(Z, 2 * A, T), make_critic(Z + A, self.value.out_dim, T)
            actor_gradient, critic_gradient = (
                make(self._num_trained) for make in self._make_gradients
            )
        for module in (encoder, actor, critic):
            set_task_names(module, self.spec.task_names)
        return encoder, actor, critic, actor_gradient, critic_gradient

    def reset_networks(self) -> None:
        """Begin anew with other weights of actor, critics and encoder, their optimizers and gradient methods.

        Buffers (an encoder's statistics), the temperatures and the auxiliaries stay.
        """
        seed = int(torch.randint(2**31, (), generator=self.generators.get("reset", CPU)))
        *networks, actor_gradient, critic_gradient = self._new_networks(seed)
        for network, fresh in zip((self.encoder, self.actor, self.critic), networks, strict=True):
            assign_parameters(fresh, network)
        self.actor_gradient.load_state_dict(actor_gradient.state_dict())
        self.critic_gradient.load_state_dict(critic_gradient.state_dict())
        assign_parameters(self.encoder, self.target_encoder)
        assign_parameters(self.critic, self.target_critic)
        optimizers: list[Optimizer] = self.optimizers(use_pl_optimizer=False)  # type: ignore[assignment]
        for optimizer in optimizers[:2]:
            optimizer.state.clear()

    def check_device(self, device: torch.device) -> None:
        """Check that the update can be compiled for the device, if that was asked for."""
        check_compile(
            self._compile,
            device,
            self.actor_gradient.is_one_pass and self.critic_gradient.is_one_pass,
        )

    def configure_optimizers(self) -> list[Optimizer]:
        """Return the optimizers of critics and encoder, of the actor, of the temperature, and of each auxiliary."""
        critic, actor, temperature = self._optimizers
        encoder = list(self.encoder.parameters())
        own = [critic([*encoder, *self.critic.parameters()]), actor(self.actor.parameters())]
        own.append(temperature(self.temperature.parameters()))
        return own + [a.make_optimizer([*encoder, *a.parameters()]) for a in self.auxiliaries]  # type: ignore[operator]

    @torch.no_grad()
    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode
    ) -> npt.NDArray[np.float32]:
        """Choose actions ``[E, A]`` between -1 and 1."""
        shape, generator = (
            (len(observation_ED), self.action_dim),
            self.generators.get("act", self.device),
        )
        if mode == "random":
            return (
                (2 * torch.rand(shape, generator=generator, device=self.device) - 1).cpu().numpy()
            )
        if np.issubdtype(observation_ED.dtype, np.floating):
            observation_ED = observation_ED.astype(np.float32)
        observation, task = to_device(observation_ED, self.device), to_device(task_E, self.device)
        policy = self._policy(self.encoder(observation, task), task)
        if mode == "exploit":
            return policy.mode().cpu().numpy()
        action_EA, _ = policy.sample(torch.randn(shape, generator=generator, device=self.device))
        return action_EA.cpu().numpy()

    def training_step(self, batch: TransitionBatch, batch_idx: int) -> None:
        """Make one update of the critics, and those of actor, temperature, targets and auxiliaries that are due."""
        optimizers: list[Any] = self.optimizers(use_pl_optimizer=False)  # type: ignore[assignment]
        critic, actor, temperature, *others = optimizers
        scaled_B = self.reward_scale(
            batch.reward_B, batch.task_B, self.temperature.values(), self.target_entropy
        )
        batch = batch._replace(reward_B=scaled_B)
        update = self.counters.updates
        if self._compile == "cudagraphs":
            begin_graphs(optimizers)
        self.encoder.observe(batch.observation_BD)
        self.target_encoder.observe(batch.observation_BD)
        self._update_critic(batch, critic)
        if update % self.actor_every == 0:
            self._update_actor(batch, actor, temperature)
        if update % self.target_every == 0:
            self._targets.step()
        for auxiliary, optimizer in zip(self.auxiliaries, others, strict=True):
            if update % auxiliary.every == 0:  # type: ignore[operator]
                self._update_auxiliary(batch, auxiliary, optimizer)
        self.counters.updates += 1

    def drain_metrics(self) -> dict[str, float]:
        """Return ``train/...`` metrics since the last call, and every task's temperature now."""
        metrics, alpha = super().drain_metrics(), self.temperature.values().tolist()
        temperatures = {
            f"train/temperature/{n}": a for n, a in zip(self.spec.task_names, alpha, strict=True)
        }
        return metrics | temperatures if metrics else {}

    def _update_critic(self, batch: TransitionBatch, optimizer: Optimizer) -> None:
        noise_BA = self._noise(batch)
        loss_T, q, target = self._compiled_critic_losses(batch, noise_BA)
        self._descend("critic", loss_T, optimizer, lambda: self._critic_loss(batch, *target)[0])
        self.mean_metrics.add({"q": q})

    def _update_actor(
        self, batch: TransitionBatch, optimizer: Optimizer, temperature: Optimizer
    ) -> None:
        noise_BA = self._noise(batch)
        with without_gradients(self._critic_parameters):
            loss_T, log_prob_B = self._compiled_actor_losses(batch, noise_BA)
        self._descend("actor", loss_T, optimizer, lambda: self._actor_losses(batch, noise_BA)[0])

        log_alpha_B = self.temperature(batch.task_B)
        loss = losses.temperature_loss(
            log_alpha_B, log_prob_B, self.target_entropy, self._num_trained
        ).mean()
        temperature.zero_grad()
        loss.backward()
        temperature.step()
        self.mean_metrics.add({"temperature_loss": loss, "entropy": -log_prob_B.mean()})

    def _descend(
        self, name: str, loss_T: Tensor, optimizer: Optimizer, again: Callable[[], Tensor]
    ) -> None:
        with torch.no_grad():
            weight_T = self.task_weighting(self.temperature(self._task_T))
        generators = (
            self.generators.get("gradient", CPU),
            self.generators.get("repair", self.device),
        )
        statistics = self._descents[name].step(
            loss_T, weight_T, self._task_T, optimizer, again, *generators
        )
        self.mean_metrics.add({f"{name}_{key}": value for key, value in statistics.items()})

    def _critic_losses(
        self, batch: TransitionBatch, noise_BA: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return each task's critic loss ``[T]``, the mean Q value, and what the target is made of."""
        with torch.no_grad():
            alpha_B = self.temperature(batch.task_B).exp()
            next_policy = self._policy(
                self.encoder(batch.next_observation_BD, batch.task_B), batch.task_B
            )
            next_action_BA, next_log_prob_B = next_policy.sample(noise_BA)
            following = (batch.next_observation_BD, next_action_BA, batch.task_B)
            next_output_QBK = self._outputs(self.target_critic, self.target_encoder, *following)
        target = (next_output_QBK, next_log_prob_B, alpha_B)
        return *self._critic_loss(batch, *target), target

    def _critic_loss(
        self,
        batch: TransitionBatch,
        next_output_QBK: Tensor,
        next_log_prob_B: Tensor,
        alpha_B: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = (batch.observation_BD, batch.action_BA, batch.task_B)
        output_QBK = task_by_task(
            self.critic_gradient, partial(self._outputs, self.critic, self.encoder), 1, *rows
        )
        loss_T = self.value.loss(
            output_QBK,
            next_output_QBK,
            batch.reward_B,
            batch.terminated_B,
            next_log_prob_B,
            alpha_B,
            self.discount,
            self._num_trained,
        )
        return loss_T, self.value.q(output_QBK.detach()).mean()

    def _actor_losses(self, batch: TransitionBatch, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return each task's actor loss ``[T]``, and the actions' log densities ``[B]``."""
        with torch.no_grad():
            z_BZ = self.encoder(batch.observation_BD, batch.task_B)
            alpha_B = self.temperature(batch.task_B).exp()
        output_B2A = task_by_task(self.actor_gradient, self.actor, 0, z_BZ, batch.task_B)
        action_BA, log_prob_B = SquashedGaussian.from_network(output_B2A, *self._log_std).sample(
            noise_BA
        )
        asked = partial(self._outputs, self.critic, lambda z_BZ, task_B: z_BZ)
        q_QB = self.value.q(
            task_by_task(self.actor_gradient, asked, 1, z_BZ, action_BA, batch.task_B)
        )
        return losses.actor_loss(log_prob_B, q_QB, alpha_B, self._num_trained), log_prob_B.detach()

    def _update_auxiliary(
        self, batch: TransitionBatch, auxiliary: nn.Module, optimizer: Optimizer
    ) -> None:
        loss = auxiliary.loss(batch, self.encoder).mean()  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.mean_metrics.add({f"{type(auxiliary).__name__.lower()}_loss": loss})

    def _policy(self, z_BZ: Tensor, task_B: Tensor) -> SquashedGaussian:
        return SquashedGaussian.from_network(self.actor(z_BZ, task_B), *self._log_std)

    def _outputs(self, critic: Ensemble, encoder: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        x_BD, action_BA, task_B = rows
        return critic(torch.cat([encoder(x_BD, task_B), action_BA], dim=-1), task_B).float()

    def _noise(self, batch: TransitionBatch) -> Tensor:
        generator = self.generators.get("learn", self.device)
        return torch.randn(batch.action_BA.shape, generator=generator, device=self.device)
