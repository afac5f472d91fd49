"""Multi-task soft actor-critic.

Shapes: ``T`` trained tasks, ``B = T * n`` batch (task-major), ``D`` observation, ``Z`` features, ``A`` action,
``Q`` critics, ``E`` environments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.spaces import Box
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Adam, Optimizer

from mtrl_lightning.algorithms import losses
from mtrl_lightning.algorithms.algorithm import Algorithm
from mtrl_lightning.algorithms.compiling import Compile, check_compile, compiled
from mtrl_lightning.algorithms.targets import frozen_copy, polyak_update
from mtrl_lightning.algorithms.temperature import Temperature
from mtrl_lightning.auxiliaries import Auxiliary
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod, Mean
from mtrl_lightning.memory import to_device
from mtrl_lightning.networks import MLP, Encoder, Ensemble, Identity, Network, SquashedGaussian
from mtrl_lightning.types import EnvSpec, Mode, TransitionBatch


class SAC(Algorithm):
    """Multi-task soft actor-critic; the defaults are MetaWorld+'s (McLean et al. 2025).

    Args:
        spec: the tasks; filled in from the data.
        actor: network of the policy, ``(in_dim, out_dim, num_tasks) -> Network``.
        critic: network of each Q function, likewise.
        encoder: maps observations to what actor and critics see; trained by the critic's loss.
        actor_gradient: how the tasks' actor losses become one gradient.
        critic_gradient: how the tasks' critic losses become one gradient.
        temperature: weight of the entropy.
        auxiliaries: further losses that train the encoder.
        num_critics: Q functions of which the smallest counts, ``Q``.
        discount: gamma.
        tau: how far the targets move at each of their updates.
        target_entropy: entropy that the temperature aims at; None for minus the number of action dimensions.
        log_std_min: lower clamp of the policy's log standard deviation.
        log_std_max: upper clamp of the policy's log standard deviation.
        actor_every: critic updates between two actor (and temperature) updates.
        target_every: critic updates between two target updates.
        actor_max_grad_norm: global norm to which the actor's gradient is clipped; None for no clipping.
        critic_max_grad_norm: the same for the critics and the encoder.
        actor_optimizer: optimizer of the actor.
        critic_optimizer: optimizer of the critics and the encoder.
        temperature_optimizer: optimizer of the temperature.
        compile: ``default`` compiles the losses with ``torch.compile``, ``cudagraphs`` also launches them as CUDA
            graphs; meant for a GPU, slower on a CPU. The first updates wait for the compiler.
        seed: of the weights and of all draws.

    Raises:
        ConfigurationError: if a number is out of its range.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        actor: Callable[[int, int, int], Network] = MLP,
        critic: Callable[[int, int, int], Network] = MLP,
        encoder: Callable[[Box, int], Encoder] = Identity,
        actor_gradient: Callable[[int], GradientMethod] = Mean,
        critic_gradient: Callable[[int], GradientMethod] = Mean,
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
        warnings.filterwarnings("ignore", ".*removed from hparams")  # factories given in Python are not saved
        self.save_hyperparameters(ignore=["spec"])
        _check_ranges(num_critics, discount, tau, actor_every, target_every, log_std_min, log_std_max)
        _check_norms(actor_max_grad_norm, critic_max_grad_norm)
        self.discount, self.tau = discount, tau
        self.action_dim = spec.action_space.shape[0]
        self.target_entropy = -float(self.action_dim) if target_entropy is None else target_entropy
        self._log_std = (log_std_min, log_std_max)
        self.actor_every, self.target_every = actor_every, target_every
        self._actor_max_norm, self._critic_max_norm = actor_max_grad_norm, critic_max_grad_norm
        self._optimizers = (critic_optimizer, actor_optimizer, temperature_optimizer)
        self._num_trained = len(spec.train_tasks)

        T, A = spec.num_tasks, self.action_dim
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.encoder = encoder(spec.observation_space, T)
            Z = self.encoder.out_dim
            self.actor = actor(Z, 2 * A, T)
            self.critic = Ensemble(lambda: critic(Z + A, 1, T), num_critics)
            self.temperature = temperature(T)
            self.actor_gradient = actor_gradient(self._num_trained)
            self.critic_gradient = critic_gradient(self._num_trained)
            self.auxiliaries = nn.ModuleList(make(spec, Z) for make in auxiliaries or [])
        self.target_encoder = frozen_copy(self.encoder)
        self.target_critic = frozen_copy(self.critic)
        self._compile = compile
        self._compiled_critic_losses = compiled(self._critic_losses, compile)
        self._compiled_actor_losses = compiled(self._actor_losses, compile)

    def check_device(self, device: torch.device) -> None:
        """Check that the update can be compiled for the device, if that was asked for."""
        check_compile(self._compile, device)

    def configure_optimizers(self) -> list[Optimizer]:
        """Return the optimizers of critics and encoder, of the actor, of the temperature, and of each auxiliary."""
        critic, actor, temperature = self._optimizers
        own = [
            critic([*self.encoder.parameters(), *self.critic.parameters()]),
            actor(self.actor.parameters()),
            temperature(self.temperature.parameters()),
        ]
        encoder = list(self.encoder.parameters())
        return own + [a.make_optimizer([*encoder, *a.parameters()]) for a in self.auxiliaries]  # type: ignore[operator]

    @torch.no_grad()
    def act(self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode) -> npt.NDArray[np.float32]:
        """Choose actions ``[E, A]`` between -1 and 1."""
        shape = (len(observation_ED), self.action_dim)
        generator = self.generators.get("act", self.device)
        if mode == "random":
            return (2 * torch.rand(shape, generator=generator, device=self.device) - 1).cpu().numpy()
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
        update = self.counters.updates
        if self._compile == "cudagraphs":
            torch.compiler.cudagraph_mark_step_begin()
        self.encoder.observe(batch.observation_BD)
        self.target_encoder.observe(batch.observation_BD)
        self._update_critic(batch, critic)
        if update % self.actor_every == 0:
            self._update_actor(batch, actor, temperature)
        if update % self.target_every == 0:
            self._update_targets()
        for auxiliary, optimizer in zip(self.auxiliaries, others, strict=True):
            if update % auxiliary.every == 0:  # type: ignore[operator]
                self._update_auxiliary(batch, auxiliary, optimizer)
        self.counters.updates += 1

    def drain_metrics(self) -> dict[str, float]:
        """Return ``train/...`` metrics since the last call, and every task's temperature now."""
        names, alpha = self.spec.task_names, self.temperature.values().tolist()
        metrics = super().drain_metrics()
        return (
            metrics | {f"train/temperature/{name}": a for name, a in zip(names, alpha, strict=True)} if metrics else {}
        )

    def _update_critic(self, batch: TransitionBatch, optimizer: Optimizer) -> None:
        loss_T, q = self._compiled_critic_losses(batch, self._noise(batch))
        optimizer.zero_grad()
        shared = [*self.encoder.parameters(), *self.critic.shared_parameters()]
        self.critic_gradient.backward(loss_T, shared)
        norm = self._step(optimizer, [*self.encoder.parameters(), *self.critic.parameters()], self._critic_max_norm)
        statistics = {f"critic_{name}": value for name, value in self.critic_gradient.metrics().items()}
        means = {"critic_loss": loss_T.mean(), "q": q, "critic_grad_norm": norm}
        self.mean_metrics.add(means | statistics)

    def _update_actor(self, batch: TransitionBatch, optimizer: Optimizer, temperature: Optimizer) -> None:
        with _without_gradients(self.critic):
            loss_T, log_prob_B = self._compiled_actor_losses(batch, self._noise(batch))
        optimizer.zero_grad()
        self.actor_gradient.backward(loss_T, list(self.actor.shared_parameters()))
        norm = self._step(optimizer, self.actor.parameters(), self._actor_max_norm)

        temperature_loss = losses.temperature_loss(
            self.temperature(batch.task_B), log_prob_B.detach(), self.target_entropy, self._num_trained
        ).mean()
        temperature.zero_grad()
        temperature_loss.backward()
        self._step(temperature, self.temperature.parameters(), None)
        statistics = {f"actor_{name}": value for name, value in self.actor_gradient.metrics().items()}
        means = {"actor_loss": loss_T.mean(), "temperature_loss": temperature_loss, "entropy": -log_prob_B.mean()}
        self.mean_metrics.add(means | {"actor_grad_norm": norm} | statistics)

    def _critic_losses(self, batch: TransitionBatch, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return each task's critic loss ``[T]``, and the mean Q value."""
        with torch.no_grad():
            alpha_B = self.temperature(batch.task_B).exp()
            next_policy = self._policy(self.encoder(batch.next_observation_BD, batch.task_B), batch.task_B)
            next_action_BA, next_log_prob_B = next_policy.sample(noise_BA)
            next_z_BZ = self.target_encoder(batch.next_observation_BD, batch.task_B)
            next_q_QB = self._q(self.target_critic, next_z_BZ, next_action_BA, batch.task_B)
            target_B = losses.critic_target(
                batch.reward_B, batch.terminated_B, next_q_QB, next_log_prob_B, alpha_B, self.discount
            )
        z_BZ = self.encoder(batch.observation_BD, batch.task_B)
        q_QB = self._q(self.critic, z_BZ, batch.action_BA, batch.task_B)
        return losses.critic_loss(q_QB, target_B, self._num_trained), q_QB.detach().mean()

    def _actor_losses(self, batch: TransitionBatch, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return each task's actor loss ``[T]``, and the actions' log densities ``[B]``."""
        with torch.no_grad():
            z_BZ = self.encoder(batch.observation_BD, batch.task_B)
            alpha_B = self.temperature(batch.task_B).exp()
        action_BA, log_prob_B = self._policy(z_BZ, batch.task_B).sample(noise_BA)
        q_QB = self._q(self.critic, z_BZ, action_BA, batch.task_B)
        return losses.actor_loss(log_prob_B, q_QB, alpha_B, self._num_trained), log_prob_B

    def _update_targets(self) -> None:
        polyak_update(self.critic, self.target_critic, self.tau)
        polyak_update(self.encoder, self.target_encoder, self.tau)

    def _update_auxiliary(self, batch: TransitionBatch, auxiliary: nn.Module, optimizer: Optimizer) -> None:
        loss = auxiliary.loss(batch, self.encoder).mean()  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        self._step(optimizer, [*self.encoder.parameters(), *auxiliary.parameters()], None)
        self.mean_metrics.add({f"{type(auxiliary).__name__.lower()}_loss": loss})

    def _policy(self, z_BZ: Tensor, task_B: Tensor) -> SquashedGaussian:
        return SquashedGaussian.from_network(self.actor(z_BZ, task_B), *self._log_std)

    def _q(self, critic: Ensemble, z_BZ: Tensor, action_BA: Tensor, task_B: Tensor) -> Tensor:
        return critic(torch.cat([z_BZ, action_BA], dim=-1), task_B).float()

    def _noise(self, batch: TransitionBatch) -> Tensor:
        generator = self.generators.get("learn", self.device)
        return torch.randn(batch.action_BA.shape, generator=generator, device=self.device)

    def _step(self, optimizer: Optimizer, parameters: Iterable[Parameter], max_norm: float | None) -> Tensor:
        """Clip and step; every optimizer's step comes through here. Return the norm before clipping."""
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if max_norm is None else max_norm)
        optimizer.step()
        return norm


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """Leave a module's parameters out of the graph, so that its input alone gets a gradient."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _check_ranges(
    num_critics: int, discount: float, tau: float, actor_every: int, target_every: int, low: float, high: float
) -> None:
    if min(num_critics, actor_every, target_every) < 1:
        raise ConfigurationError("num_critics, actor_every and target_every must be at least 1")
    if not (0 <= discount <= 1 and 0 < tau <= 1):
        raise ConfigurationError(f"discount is {discount}, tau {tau}: give 0 <= discount <= 1 and 0 < tau <= 1")
    if not low < high:
        raise ConfigurationError(f"log_std_min {low} must be below log_std_max {high}")


def _check_norms(*norms: float | None) -> None:
    if any(norm is not None and not norm > 0 for norm in norms):
        raise ConfigurationError(
            "actor_max_grad_norm and critic_max_grad_norm must be above 0, or null for no clipping"
        )
