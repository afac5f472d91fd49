"""The programs that ``end_to_end`` compares, each a process that trains in windows (``pacing.py``).

``python -m benchmarks.contestants OPTIONS`` is one of the peers; ``OPTIONS`` is
JSON. Ours is the command line itself.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.pacing import Pacer
from benchmarks.plain_sac import PlainReplay, PlainSAC, Sizes
from benchmarks.upstream import make_sb3, make_vec
from mtrl_lightning.counters import Stopwatch
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


def train_sb3(job: Job, vector: Any) -> None:
    """Train Stable-Baselines3's SAC: its MLP policy, with the task's one-hot in the observation."""
    sb3 = import_optional("stable_baselines3", '"mtrl_lightning[bench]"')
    envs = make_sb3(job.tasks, vector)
    pacer = Pacer(job.steps, job.settle, job.descriptor)
    warmup = job.warmup * envs.num_envs

    class Pace(sb3.common.callbacks.BaseCallback):  # type: ignore[name-defined]
        def _on_step(self) -> bool:
            return self.num_timesteps <= warmup or pacer.tick()

    optimizer = {"eps": 1e-5}
    model = sb3.SAC(
        "MlpPolicy",
        envs,
        learning_rate=3e-4,
        buffer_size=job.capacity,
        learning_starts=warmup,
        batch_size=job.batch_size,
        tau=0.005,
        gamma=0.99,
        train_freq=1,
        gradient_steps=1,
        device=job.device,
        seed=1,
        policy_kwargs={
            "net_arch": [job.width] * job.depth,
            "n_critics": 2,
            "optimizer_kwargs": optimizer,
        },
    )
    model.learn(total_timesteps=10**12, callback=Pace())
    envs.close()


def train_plain(job: Job, vector: Any, bf16: bool) -> None:
    """Train the plain loop on Gymnasium's vector environment."""
    envs = make_vec(job.tasks, vector, use_one_hot=True)
    watch = Stopwatch()
    num_envs = envs.num_envs
    (D,) = envs.single_observation_space.shape  # type: ignore[misc]
    (A,) = envs.single_action_space.shape  # type: ignore[misc]
    agent = PlainSAC(
        Sizes(D - num_envs, A, num_envs, job.batch_size, job.width, job.depth),
        device=job.device,
        bf16=bf16,
        seed=1,
    )
    replay = PlainReplay(num_envs, D, A, job.capacity)
    pacer = Pacer(job.steps, job.settle, job.descriptor, watch.drain)
    task_E = torch.arange(num_envs, device=job.device)
    observation_ED, _ = envs.reset(seed=1)
    envs.action_space.seed(1)
    step = 0
    while step < job.warmup or pacer.tick():
        with watch.measure("act"):
            warm = step < job.warmup
            action_EA = envs.action_space.sample() if warm else agent.act(observation_ED, task_E)
        with watch.measure("step"):
            next_ED, reward_E, terminated_E, truncated_E, info = envs.step(action_EA)
            successor_ED = _successors(next_ED, terminated_E | truncated_E, info)
            replay.add(observation_ED, action_EA, reward_E, successor_ED, terminated_E)
            observation_ED = next_ED
        if step >= job.warmup:
            with watch.measure("sample"):
                batch = replay.sample(job.batch_size, job.device)
            with watch.measure("update"):
                agent.update(batch)
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
