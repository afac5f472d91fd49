"""Programs that ours is compared with: Stable-Baselines3's SAC and PPO, and a plain PyTorch loop.

Each is a process that trains in windows (``measuring.Pacer``), with the task's one-hot in the
observation.

The plain loop is SAC with multi-head networks, the algorithm of ``algorithms/sac.py``, without
Lightning and as one would write it without thinking of speed (CleanRL's way), so that what the
framework costs and what its shortcuts gain can be measured. With the same weights, batch and noise
both give the same losses, which a test holds.

Shapes: ``T`` tasks, ``E`` environments, ``B = T * n`` batch, ``D`` observation with the
task's one-hot, ``A`` action.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

from benchmarks.environments import Strategy, names_of, one_hot_makers
from benchmarks.measuring import NEVER, SB3, Pacer, synchronize
from mtrl_lightning.errors import import_optional
from mtrl_lightning.utils.counters import Stopwatch

PRELOADED = ["stable_baselines3", "metaworld", "benchmarks.baselines"]
"""Imported once for all processes of ``SubprocVecEnv``: a hundred imports fill the memory."""
LEARNING_RATE = 3e-4
EPSILON = 1e-5
"""Adam's."""
DISCOUNT = 0.99
TAU = 0.005
"""Share of the critics in their targets at each update."""


# ---- the work of a trainer ----


@dataclass(kw_only=True)
class Job:
    """The work of a trainer."""

    tasks: list[str]
    """A set such as ``MT10``, or names."""
    device: str
    """``cpu`` or ``cuda``."""
    threads: int | None
    """PyTorch's; None for its own choice."""
    width: int
    depth: int = 3
    settle: int
    """Vector steps with updates, or iterations of PPO, before the first window."""
    vector: Strategy = "sync"
    environments: str = "metaworld"
    """One of ``ENVIRONMENTS``."""
    envs_per_task: int = 1
    horizon: int = 500
    """Steps of an episode."""
    seed: int = 1
    """Of weights, environments and random numbers."""

    @property
    def num_tasks(self) -> int:
        """Tasks."""
        return len(names_of(self.tasks))

    @property
    def num_envs(self) -> int:
        """Environments of all tasks."""
        return self.num_tasks * self.envs_per_task

    @property
    def env_steps(self) -> int:
        """Environment steps of a vector step, or of an iteration."""
        return self.num_envs

    def makers(self) -> list[Callable[[], gym.Env]]:
        """Return functions that make the environments."""
        return one_hot_makers(
            self.tasks, self.environments, self.envs_per_task, self.horizon, self.seed
        )


@dataclass(kw_only=True)
class SACJob(Job):
    """The work of SAC."""

    width: int = 400
    settle: int = 10
    batch_size: int = 1280
    capacity: int = 1_000_000
    warmup: int = 100
    """Vector steps with random actions."""
    steps: int = 40
    """Vector steps of a window."""


@dataclass(kw_only=True)
class PPOJob(Job):
    """The work of PPO, in iterations: a collection and all its updates."""

    width: int = 256
    settle: int = 1
    envs_per_task: int = 10
    horizon: int = 200
    num_steps: int = 200
    """Steps of each environment in an iteration."""
    num_epochs: int = 8
    num_minibatches: int = 16
    """Of an epoch."""
    learning_rate: float = 3e-4
    entropy_coef: float = 0.0

    @property
    def env_steps(self) -> int:
        """Environment steps of an iteration."""
        return self.num_envs * self.num_steps

    @property
    def batch_size(self) -> int:
        """Rows of a minibatch."""
        return self.env_steps // self.num_minibatches

    @property
    def updates(self) -> int:
        """Updates of an iteration."""
        return self.num_epochs * self.num_minibatches


# ---- Stable-Baselines3 ----


def sb3_vector(makers: Sequence[Callable[[], gym.Env]], strategy: Strategy) -> Any:
    """Return Stable-Baselines3's ``DummyVecEnv`` or ``SubprocVecEnv``."""
    vec_env = import_optional(*SB3).common.vec_env
    if strategy == "sync":
        return vec_env.DummyVecEnv(makers)
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    return vec_env.SubprocVecEnv(makers)


def make_sb3_sac(envs: Any, width: int, depth: int, **options: Any) -> Any:
    """Return Stable-Baselines3's SAC with an MLP policy and further options."""
    return import_optional(*SB3).SAC(
        "MlpPolicy",
        envs,
        learning_rate=LEARNING_RATE,
        tau=TAU,
        gamma=DISCOUNT,
        policy_kwargs={
            "net_arch": [width] * depth,
            "n_critics": 2,
            "optimizer_kwargs": {"eps": EPSILON},
        },
        **options,
    )


def train_sb3_sac(job: SACJob) -> None:
    """Train Stable-Baselines3's SAC with its MLP policy."""
    sb3 = import_optional(*SB3)
    envs = sb3_vector(job.makers(), job.vector)
    pacer = Pacer(job.steps, job.settle)
    warmup = job.warmup * envs.num_envs

    class Pace(sb3.common.callbacks.BaseCallback):  # type: ignore[name-defined]
        def _on_step(self) -> bool:
            return self.num_timesteps <= warmup or pacer.tick()

    model = make_sb3_sac(
        envs,
        job.width,
        job.depth,
        buffer_size=job.capacity,
        learning_starts=warmup,
        batch_size=job.batch_size,
        train_freq=1,
        gradient_steps=1,
        device=job.device,
        seed=job.seed,
    )
    model.learn(total_timesteps=NEVER, callback=Pace())
    envs.close()


def train_sb3_ppo(job: PPOJob) -> None:
    """Train Stable-Baselines3's PPO with its MLP policy."""
    sb3 = import_optional(*SB3)
    envs = sb3_vector(job.makers(), job.vector)
    watch = Stopwatch()
    pacer = Pacer(1, job.settle, watch.drain)

    class Pace(sb3.common.callbacks.BaseCallback):  # type: ignore[name-defined]
        def _on_rollout_start(self) -> None:
            if self.num_timesteps > 0:
                synchronize()
                watch.stop("update")
            if not pacer.tick():
                sys.exit(0)
            watch.start("collect")

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            watch.stop("collect")
            watch.start("update")

    layers = [job.width] * job.depth
    model: Any = sb3.PPO(
        "MlpPolicy",
        envs,
        learning_rate=job.learning_rate,
        n_steps=job.num_steps,
        batch_size=job.batch_size,
        n_epochs=job.num_epochs,
        gamma=DISCOUNT,
        gae_lambda=0.95,
        ent_coef=job.entropy_coef,
        device=job.device,
        seed=job.seed,
        policy_kwargs={
            "net_arch": {"pi": layers, "vf": layers},
            "activation_fn": torch.nn.ReLU,
        },
    )
    model.learn(total_timesteps=NEVER, callback=Pace())


# ---- the plain loop ----


class MultiHeadMLP(nn.Module):
    """Shared hidden layers and one output layer per task.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        width: features of a hidden layer.
        depth: number of hidden layers.
    """

    def __init__(self, in_dim: int, out_dim: int, num_tasks: int, width: int, depth: int) -> None:
        super().__init__()
        self.num_tasks = num_tasks
        self.out_dim = out_dim
        layers: list[nn.Module] = []
        for i in range(depth):
            layers += [nn.Linear(in_dim if i == 0 else width, width), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.Linear(width, num_tasks * out_dim)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        y_BTO = self.heads(self.trunk(x_BD)).view(-1, self.num_tasks, self.out_dim)
        return y_BTO[torch.arange(len(task_B), device=task_B.device), task_B]


class PlainBatch(NamedTuple):
    """A batch with the one-hot among the observations, ``B`` rows of all tasks."""

    observation_BD: Tensor
    action_BA: Tensor
    reward_B: Tensor
    next_observation_BD: Tensor
    terminated_B: Tensor
    task_B: Tensor


class PlainSAC:
    """Networks, optimizers and one update.

    Args:
        observation_dim: without the one-hot.
        action_dim: ``A``.
        num_tasks: ``T``.
        width: of the hidden layers.
        depth: number of them.
        device: where they are.
        bf16: whether matrix products are made in bfloat16.
        seed: of the noise.
    """

    max_norm = 1.0

    def __init__(
        self,
        observation_dim: int,
        action_dim: int,
        num_tasks: int,
        width: int,
        depth: int,
        device: str = "cpu",
        bf16: bool = False,
        seed: int = 0,
    ) -> None:
        adam = partial(torch.optim.Adam, lr=LEARNING_RATE, eps=EPSILON)
        D = observation_dim + num_tasks
        A = action_dim
        shape = (num_tasks, width, depth)
        self.target_entropy = -float(A)
        self.device = device
        self._bf16 = bf16
        self.actor = MultiHeadMLP(D, 2 * A, *shape).to(device)
        self.qf1, self.qf2 = (MultiHeadMLP(D + A, 1, *shape).to(device) for _ in range(2))
        self.qf1_target = copy.deepcopy(self.qf1)
        self.qf2_target = copy.deepcopy(self.qf2)
        self.log_alpha_T = torch.zeros(num_tasks, requires_grad=True, device=device)
        self.q_optimizer = adam([*self.qf1.parameters(), *self.qf2.parameters()])
        self.actor_optimizer = adam(self.actor.parameters())
        self.alpha_optimizer = adam([self.log_alpha_T])
        self.generator = torch.Generator(device).manual_seed(seed)

    def sample_action(self, x_BD: Tensor, task_B: Tensor) -> tuple[Tensor, Tensor]:
        """Sample actions ``[B, A]`` and return them with their log densities ``[B]``."""
        mean_BA, log_std_BA = self.actor(x_BD, task_B).float().chunk(2, dim=-1)
        log_std_BA = log_std_BA.clamp(-20, 2)
        noise_BA = torch.randn(mean_BA.shape, generator=self.generator, device=self.device)
        u_BA = mean_BA + log_std_BA.exp() * noise_BA
        normal_BA = -0.5 * noise_BA.square() - log_std_BA - 0.5 * math.log(2 * math.pi)
        squash_BA = 2 * (math.log(2) - u_BA - F.softplus(-2 * u_BA))
        return torch.tanh(u_BA), (normal_BA - squash_BA).sum(-1)

    @torch.no_grad()
    def act(self, observation_ED: npt.NDArray, task_E: Tensor) -> npt.NDArray[np.float32]:
        """Sample actions ``[E, A]`` for observations that have the one-hot already."""
        x_ED = torch.as_tensor(observation_ED, dtype=torch.float32, device=self.device)
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self._bf16):
            return self.sample_action(x_ED, task_E)[0].cpu().numpy()

    def update(self, batch: PlainBatch) -> dict[str, Tensor]:
        """Make one update of critics, actor, temperatures and targets; return the losses."""
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self._bf16):
            return {**self._update_critic(batch), **self._update_actor(batch)}

    def _update_critic(self, batch: PlainBatch) -> dict[str, Tensor]:
        task_B = batch.task_B
        with torch.no_grad():
            alpha_B = self.log_alpha_T.exp()[task_B]
            next_action_BA, next_log_prob_B = self.sample_action(batch.next_observation_BD, task_B)
            next_x = torch.cat([batch.next_observation_BD, next_action_BA], 1)
            next_q1_B = self.qf1_target(next_x, task_B).float().squeeze(-1)
            next_q2_B = self.qf2_target(next_x, task_B).float().squeeze(-1)
            next_value_B = torch.min(next_q1_B, next_q2_B) - alpha_B * next_log_prob_B
            target_B = batch.reward_B + DISCOUNT * (~batch.terminated_B).float() * next_value_B
        x = torch.cat([batch.observation_BD, batch.action_BA], 1)
        q1_B = self.qf1(x, task_B).float().squeeze(-1)
        q2_B = self.qf2(x, task_B).float().squeeze(-1)
        loss = F.mse_loss(q1_B, target_B) + F.mse_loss(q2_B, target_B)
        self.q_optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(
            [*self.qf1.parameters(), *self.qf2.parameters()], self.max_norm
        )
        self.q_optimizer.step()
        return {"critic_loss": loss.detach(), "critic_grad_norm": norm}

    def _update_actor(self, batch: PlainBatch) -> dict[str, Tensor]:
        task_B = batch.task_B
        action_BA, log_prob_B = self.sample_action(batch.observation_BD, task_B)
        x = torch.cat([batch.observation_BD, action_BA], 1)
        q_B = torch.min(
            self.qf1(x, task_B).float().squeeze(-1), self.qf2(x, task_B).float().squeeze(-1)
        )
        loss = (self.log_alpha_T.detach().exp()[task_B] * log_prob_B - q_B).mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.actor.parameters(), self.max_norm)
        self.actor_optimizer.step()

        alpha_loss = (
            -self.log_alpha_T[task_B] * (log_prob_B.detach() + self.target_entropy)
        ).mean()
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()

        for source, target in ((self.qf1, self.qf1_target), (self.qf2, self.qf2_target)):
            for parameter, copied in zip(source.parameters(), target.parameters(), strict=True):
                copied.data.copy_(TAU * parameter.data + (1 - TAU) * copied.data)
        return {
            "actor_loss": loss.detach(),
            "actor_grad_norm": norm,
            "temperature_loss": alpha_loss.detach(),
        }


class PlainReplay:
    """A ring of transitions for each environment, in NumPy.

    Args:
        num_envs: environments, ``E``.
        observation_dim: with the one-hot, ``D``.
        action_dim: ``A``.
        capacity: transitions over all environments.
        seed: of the sampling.
        envs_per_task: environments of each task, which follow one another.
    """

    def __init__(
        self,
        num_envs: int,
        observation_dim: int,
        action_dim: int,
        capacity: int,
        seed: int = 0,
        envs_per_task: int = 1,
    ) -> None:
        self._rows = capacity // num_envs
        shape = (self._rows, num_envs)
        self._rings = (
            np.zeros((*shape, observation_dim), np.float32),
            np.zeros((*shape, action_dim), np.float32),
            np.zeros(shape, np.float32),
            np.zeros((*shape, observation_dim), np.float32),
            np.zeros(shape, np.bool_),
        )
        self._envs_per_task = envs_per_task
        self._num_tasks = num_envs // envs_per_task
        self._added = 0
        self._generator = np.random.default_rng(seed)

    def add(self, *fields: npt.NDArray) -> None:
        """Store observation, action, reward, next observation, termination of each environment."""
        row = self._added % self._rows
        for ring, column in zip(self._rings, fields, strict=True):
            ring[row] = column
        self._added += 1

    def sample(self, batch_size: int, device: str = "cpu") -> PlainBatch:
        """Sample the same number of transitions of every task."""
        n = batch_size // self._num_tasks
        task = np.repeat(np.arange(self._num_tasks), n)
        row = self._generator.integers(0, min(self._added, self._rows), len(task))
        copy_B = self._generator.integers(0, self._envs_per_task, len(task))
        env = task * self._envs_per_task + copy_B
        columns = (*(ring[row, env] for ring in self._rings), task)
        tensors = (torch.as_tensor(column, device=device) for column in columns)
        return PlainBatch(*tensors)  # type: ignore[arg-type]


def train_plain(job: SACJob) -> None:
    """Train the plain loop on Gymnasium's vector environment."""
    kind = gym.vector.SyncVectorEnv if job.vector == "sync" else gym.vector.AsyncVectorEnv
    envs = kind(job.makers(), autoreset_mode=AutoresetMode.SAME_STEP)
    (D,) = envs.single_observation_space.shape  # type: ignore[misc]
    (A,) = envs.single_action_space.shape  # type: ignore[misc]
    T = job.num_tasks
    agent = PlainSAC(D - T, A, T, job.width, job.depth, device=job.device, seed=job.seed)
    replay = PlainReplay(job.num_envs, D, A, job.capacity, job.seed, job.envs_per_task)
    step = 0
    watch = Stopwatch()
    pacer = Pacer(job.steps, job.settle, watch.drain)
    task_E = torch.arange(T, device=job.device).repeat_interleave(job.envs_per_task)
    observation_ED, _ = envs.reset(seed=job.seed)
    envs.action_space.seed(job.seed)
    while step < job.warmup or pacer.tick():
        is_learning = step >= job.warmup
        with watch.measure("act"):
            if is_learning:
                action_EA = agent.act(observation_ED, task_E)
            else:
                action_EA = envs.action_space.sample()
        with watch.measure("step"):
            next_ED, reward_E, terminated_E, truncated_E, info = envs.step(action_EA)
            successor_ED = next_ED.copy()  # at an episode's end it is in the info
            for i in np.flatnonzero(terminated_E | truncated_E):
                successor_ED[i] = info["final_obs"][i]
            replay.add(observation_ED, action_EA, reward_E, successor_ED, terminated_E)
            observation_ED = next_ED
        if is_learning:
            with watch.measure("sample"):
                batch = replay.sample(job.batch_size, job.device)
            with watch.measure("update"):
                agent.update(batch)
        step += 1
    envs.close()


# ---- the function of a process ----


TRAINERS: dict[str, Callable[[Any], None]] = {
    "sb3 sac": train_sb3_sac,
    "sb3 ppo": train_sb3_ppo,
    "plain sac": train_plain,
}


def train(kind: str, job: Job) -> None:
    """Train a baseline until no further window is requested; the function of its process.

    Args:
        kind: a name in ``TRAINERS``.
        job: its work.
    """
    gym.logger.min_level = gym.logger.ERROR
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    TRAINERS[kind](job)
