"""What ``end_to_end`` and ``time_to_success`` compare: processes that train in windows.

``python -m benchmarks.contestants OPTIONS`` is one of the peers; ``OPTIONS`` is
JSON. Ours is the command line itself. See ``pacing.py`` for the windows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.examining import Examiner, OneHotPolicy
from benchmarks.pacing import Pacer
from benchmarks.plain_sac import Hyperparameters, PlainReplay, PlainSAC, Sizes
from benchmarks.upstream import make_sb3, make_vec, names_of, one_hot_makers, sb3_vector
from mtrl_lightning.counters import Stopwatch
from mtrl_lightning.envs import MetaWorld
from mtrl_lightning.errors import import_optional


@dataclass
class Job:
    """What a contestant trains, and how."""

    tasks: list[str]
    """A set such as ``MT10``, or names."""
    width: int
    depth: int
    batch_size: int
    capacity: int
    warmup: int
    """Vector steps with random actions."""
    steps: int
    """Vector steps of a window."""
    settle: int
    """Vector steps with updates before the first window."""
    device: str
    """``cpu`` or ``cuda``."""
    threads: int | None
    """PyTorch's; None for its own choice."""
    descriptor: int = -1
    """Of the open file that the windows' seconds are written to."""
    seed: int = 1
    """Of weights, environments and draws."""
    updates: int = 1
    """Updates per vector step."""
    hyperparameters: dict[str, float] = field(default_factory=dict)
    """Those that differ from the defaults of ``Hyperparameters``."""
    num_episodes: int = 0
    """Test episodes per task after each window; 0 for none.

    With test episodes, the environments have the goals of this package's benchmark.
    """
    copies: int = 1
    """Of each task's environment, where there are test episodes; else 1."""
    horizon: int = 500
    """Steps of an episode, where there are test episodes; else 500."""
    fast: bool = False
    """Whether environments are stepped with our code, where there are test episodes."""

    @property
    def chosen(self) -> Hyperparameters:
        """The hyper-parameters."""
        return Hyperparameters(**self.hyperparameters)

    def makers(self) -> list[Callable[[], gym.Env]]:
        """Return what makes the environments with our goals."""
        return one_hot_makers(self.tasks, self.copies, self.horizon, self.fast, self.seed)

    def examiner(self) -> Examiner:
        """Return what runs test episodes."""
        benchmark = MetaWorld(list(names_of(self.tasks)), horizon=self.horizon)
        return Examiner(benchmark, self.num_episodes)


def train_sb3(job: Job, vector: Any) -> None:
    """Train Stable-Baselines3's SAC: its MLP policy, with the task's one-hot in the observation."""
    sb3 = import_optional("stable_baselines3", '"mtrl_lightning[bench]"')
    envs = sb3_vector(job.makers(), vector) if job.num_episodes else make_sb3(job.tasks, vector)
    chosen = job.chosen
    more: dict[str, Any] = {}
    if job.num_episodes:
        policy = OneHotPolicy(
            len(names_of(job.tasks)), lambda x_ED, _: model.predict(x_ED, deterministic=True)[0]
        )
        examiner = job.examiner()
        more["examine"] = lambda: examiner.examine(policy, model.num_timesteps, model._n_updates)
    pacer = Pacer(job.steps, job.settle, job.descriptor, **more)
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
    model.learn(total_timesteps=10**12, callback=Pace())
    envs.close()


def train_plain(job: Job, vector: Any, bf16: bool) -> None:
    """Train the plain loop on Gymnasium's vector environment."""
    num_tasks = len(names_of(job.tasks))
    if job.num_episodes:
        envs = _same_step(job.makers(), vector)
    else:
        envs = make_vec(job.tasks, vector, use_one_hot=True)
    watch = Stopwatch()
    num_envs = envs.num_envs
    (D,) = envs.single_observation_space.shape  # type: ignore[misc]
    (A,) = envs.single_action_space.shape  # type: ignore[misc]
    agent = PlainSAC(
        Sizes(D - num_tasks, A, num_tasks, job.batch_size, job.width, job.depth),
        device=job.device,
        bf16=bf16,
        seed=job.seed,
        hyperparameters=job.chosen,
    )
    copies = num_envs // num_tasks
    replay = PlainReplay(num_envs, D, A, job.capacity, job.seed, copies)
    step = 0
    updates = 0
    more: dict[str, Any] = {}
    if job.num_episodes:
        policy = OneHotPolicy(
            num_tasks, lambda x_ED, tested_E: agent.act_best(x_ED, torch.as_tensor(tested_E))
        )
        examiner = job.examiner()
        more["examine"] = lambda: examiner.examine(policy, step * num_envs, updates)
    pacer = Pacer(job.steps, job.settle, job.descriptor, watch.drain, **more)
    task_E = torch.arange(num_tasks, device=job.device).repeat_interleave(copies)
    observation_ED, _ = envs.reset(seed=job.seed)
    envs.action_space.seed(job.seed)
    while step < job.warmup or pacer.tick():
        with watch.measure("act"):
            warm = step < job.warmup
            action_EA = envs.action_space.sample() if warm else agent.act(observation_ED, task_E)
        with watch.measure("step"):
            next_ED, reward_E, terminated_E, truncated_E, info = envs.step(action_EA)
            successor_ED = _successors(next_ED, terminated_E | truncated_E, info)
            replay.add(observation_ED, action_EA, reward_E, successor_ED, terminated_E)
            observation_ED = next_ED
        for _ in range(job.updates if step >= job.warmup else 0):
            with watch.measure("sample"):
                batch = replay.sample(job.batch_size, job.device)
            with watch.measure("update"):
                agent.update(batch)
            updates += 1
        step += 1
    envs.close()


def _same_step(makers: Sequence[Callable[[], gym.Env]], strategy: str) -> gym.vector.VectorEnv:
    kind = gym.vector.SyncVectorEnv if strategy == "sync" else gym.vector.AsyncVectorEnv
    return kind(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def _successors(observation_ED: Any, done_E: Any, info: dict[str, Any]) -> Any:
    """Return the true next observations, which at an episode's end are in ``final_obs``."""
    if not done_E.any():
        return observation_ED
    successor_ED = observation_ED.copy()
    for i in np.flatnonzero(done_E):
        successor_ED[i] = info["final_obs"][i]
    return successor_ED


def main() -> None:
    """Train one of the peers until no further window is asked for."""
    options = json.loads(sys.argv[1])
    train = {"sb3": train_sb3, "plain": train_plain}[options.pop("kind")]
    more = {name: options.pop(name) for name in ("vector", "bf16") if name in options}
    gym.logger.min_level = gym.logger.ERROR
    if options["threads"] is not None:
        torch.set_num_threads(options["threads"])
    train(Job(**options), **more)  # type: ignore[operator]


if __name__ == "__main__":
    main()
