"""Programs that ours is compared with: Stable-Baselines3's SAC and PPO, and a plain PyTorch loop.

Each is a process that trains in windows (``measuring.Pacer``), with the task's one-hot in the
observation. The plain loop is that of ``plain_sac.py``.

Shapes: ``T`` tasks, ``E`` environments, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AutoresetMode

from benchmarks.environments import Strategy, names_of, one_hot_makers
from benchmarks.measuring import NEVER, SB3, Pacer, synchronize
from benchmarks.plain_sac import Hyperparameters, PlainReplay, PlainSAC, Sizes
from mtrl_lightning.counters import Stopwatch
from mtrl_lightning.envs import MetaWorld
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.errors import import_optional
from mtrl_lightning.rollout import Evaluator
from mtrl_lightning.types import Mode, Policy

PRELOADED = ["stable_baselines3", "metaworld", "benchmarks.baselines"]
"""Imported once for all processes of ``SubprocVecEnv``: a hundred imports fill the memory."""
EVALUATION_ENVS = 5
"""Environments per task that are stepped together; their number changes no episode."""


# ---- test episodes between windows ----


class Examiner:
    """Evaluate a policy by the package's test episodes: the best actions, success in any step.

    Environments are stepped in this process, so that no worker runs beside the training.

    Args:
        benchmark: the tasks.
        num_episodes: test episodes per task.
    """

    def __init__(self, benchmark: Benchmark, num_episodes: int) -> None:
        self._names = benchmark.spec.task_names
        self._evaluator = Evaluator(
            benchmark, num_episodes=num_episodes, envs_per_task=EVALUATION_ENVS, num_workers=0
        )

    def examine(self, policy: Policy, env_steps: int, updates: int) -> dict[str, Any]:
        """Return the success of each task, beside the steps and updates made so far."""
        success_T = self._evaluator.evaluate(policy).success_T
        success = dict(zip(self._names, success_T.tolist(), strict=True))
        return {"env_steps": env_steps, "updates": updates, "success": success}


class OneHotPolicy:
    """A policy of a baseline, which takes observations with the task's one-hot.

    Args:
        num_tasks: of the one-hot.
        act_best: returns actions ``[E, A]`` without noise for such observations and the tasks.
    """

    def __init__(self, num_tasks: int, act_best: Callable[..., npt.NDArray]) -> None:
        self._one_hot_TT = np.eye(num_tasks)
        self._act_best = act_best

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode
    ) -> npt.NDArray:
        """Choose the best actions ``[E, A]``, whatever the mode."""
        x_ED = np.concatenate([observation_ED, self._one_hot_TT[task_E]], axis=1)
        return self._act_best(x_ED, task_E)


# ---- trainers ----


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
    num_episodes: int = 0
    """Test episodes per task after each window; 0 for none."""

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

    def examination(
        self, act_best: Callable[..., npt.NDArray], counts: Callable[[], tuple[int, int]]
    ) -> Callable[[], dict[str, Any]]:
        """Return a function that runs the test episodes, if there are any.

        Args:
            act_best: of ``OneHotPolicy``.
            counts: returns the env steps and updates so far.
        """
        if not self.num_episodes:
            return dict
        benchmark = MetaWorld(list(names_of(self.tasks)), horizon=self.horizon)
        examiner = Examiner(benchmark, self.num_episodes)
        policy = OneHotPolicy(self.num_tasks, act_best)
        return lambda: examiner.examine(policy, *counts())


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
    updates: int = 1
    """Per vector step."""
    hyperparameters: dict[str, float] = field(default_factory=dict)
    """Those that differ from the defaults of ``Hyperparameters``."""


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
    iterations: int = 1
    """Of a window."""

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


def train(kind: str, job: dict[str, Any]) -> None:
    """Train a baseline until no further window is requested; the function of its process.

    Args:
        kind: a name in ``TRAINERS``.
        job: options of its job.
    """
    gym.logger.min_level = gym.logger.ERROR
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    make_job, run = TRAINERS[kind]
    run(make_job(**job))


def sb3_vector(makers: Sequence[Callable[[], gym.Env]], strategy: Strategy) -> Any:
    """Return Stable-Baselines3's ``DummyVecEnv`` or ``SubprocVecEnv``."""
    vec_env = import_optional(*SB3).common.vec_env
    if strategy == "sync":
        return vec_env.DummyVecEnv(makers)
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    return vec_env.SubprocVecEnv(makers)


def train_sb3_sac(job: SACJob) -> None:
    """Train Stable-Baselines3's SAC with its MLP policy."""
    sb3 = import_optional(*SB3)
    envs = sb3_vector(job.makers(), job.vector)
    chosen = Hyperparameters(**job.hyperparameters)
    examine = job.examination(
        lambda x_ED, _: model.predict(x_ED, deterministic=True)[0],
        lambda: (model.num_timesteps, model._n_updates),
    )
    pacer = Pacer(job.steps, job.settle, examine=examine)
    warmup = job.warmup * envs.num_envs

    class Pace(sb3.common.callbacks.BaseCallback):  # type: ignore[name-defined]
        def _on_step(self) -> bool:
            return self.num_timesteps <= warmup or pacer.tick()

    model: Any = sb3.SAC(
        "MlpPolicy",
        envs,
        learning_rate=chosen.learning_rate,
        buffer_size=job.capacity,
        learning_starts=warmup,
        batch_size=job.batch_size,
        tau=chosen.tau,
        gamma=chosen.discount,
        train_freq=1,
        gradient_steps=job.updates,
        ent_coef=f"auto_{chosen.temperature}",
        device=job.device,
        seed=job.seed,
        policy_kwargs={
            "net_arch": [job.width] * job.depth,
            "n_critics": 2,
            "optimizer_kwargs": {"eps": chosen.epsilon},
        },
    )
    model.learn(total_timesteps=NEVER, callback=Pace())
    envs.close()


def train_sb3_ppo(job: PPOJob) -> None:
    """Train Stable-Baselines3's PPO with its MLP policy."""
    sb3 = import_optional(*SB3)
    envs = sb3_vector(job.makers(), job.vector)
    watch = Stopwatch()
    examine = job.examination(
        lambda x_ED, _: model.predict(x_ED, deterministic=True)[0],
        # Stable-Baselines3 counts an epoch as an update
        lambda: (model.num_timesteps, model._n_updates * job.num_minibatches),
    )
    pacer = Pacer(job.iterations, job.settle, watch.drain, examine=examine)

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
        gamma=0.99,
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


def train_plain(job: SACJob) -> None:
    """Train the plain loop on Gymnasium's vector environment."""
    kind = gym.vector.SyncVectorEnv if job.vector == "sync" else gym.vector.AsyncVectorEnv
    envs = kind(job.makers(), autoreset_mode=AutoresetMode.SAME_STEP)
    (D,) = envs.single_observation_space.shape  # type: ignore[misc]
    (A,) = envs.single_action_space.shape  # type: ignore[misc]
    T = job.num_tasks
    agent = PlainSAC(
        Sizes(D - T, A, T, job.batch_size, job.width, job.depth),
        device=job.device,
        seed=job.seed,
        hyperparameters=Hyperparameters(**job.hyperparameters),
    )
    replay = PlainReplay(job.num_envs, D, A, job.capacity, job.seed, job.envs_per_task)
    step = 0
    updates = 0
    examine = job.examination(
        lambda x_ED, tested_E: agent.act_best(x_ED, torch.as_tensor(tested_E)),
        lambda: (step * job.num_envs, updates),
    )
    watch = Stopwatch()
    pacer = Pacer(job.steps, job.settle, watch.drain, examine=examine)
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
            successor_ED = _successors(next_ED, terminated_E | truncated_E, info)
            replay.add(observation_ED, action_EA, reward_E, successor_ED, terminated_E)
            observation_ED = next_ED
        for _ in range(job.updates if is_learning else 0):
            with watch.measure("sample"):
                batch = replay.sample(job.batch_size, job.device)
            with watch.measure("update"):
                agent.update(batch)
            updates += 1
        step += 1
    envs.close()


def _successors(observation_ED: Any, done_E: Any, info: dict[str, Any]) -> Any:
    """Return the true next observations, which at an episode's end are in ``final_obs``."""
    if not done_E.any():
        return observation_ED
    successor_ED = observation_ED.copy()
    for i in np.flatnonzero(done_E):
        successor_ED[i] = info["final_obs"][i]
    return successor_ED


TRAINERS: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "sb3 sac": (SACJob, train_sb3_sac),
    "sb3 ppo": (PPOJob, train_sb3_ppo),
    "plain sac": (SACJob, train_plain),
}
