"""Environments that ours are compared with.

Nothing here imports PyTorch, so that processes which only step environments start quickly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FlattenObservation, RescaleAction

from mtrl_lightning.envs import DMControl, MetaWorld
from mtrl_lightning.envs.benchmarks.dm_control import SuiteTasks
from mtrl_lightning.envs.benchmarks.dm_control_domains import import_suite
from mtrl_lightning.envs.benchmarks.padding import pad_to_spec
from mtrl_lightning.errors import import_optional

NAMED = {10: "MT10", 25: "MT25", 50: "MT50"}
"""MetaWorld's sets of tasks, by their size."""
Strategy = Literal["sync", "async"]
"""Environments in the process of the trainer, or each in a process of its own."""
ENVIRONMENTS = ("metaworld", "ours")
"""MetaWorld's own; our faster code."""


# ---- MetaWorld ----


def names_of(tasks: list[str]) -> tuple[str, ...]:
    """Return the names of the tasks of a set, such as ``["MT10"]``, or of single tasks."""
    suite = import_optional("metaworld", "metaworld")
    if len(tasks) == 1 and tasks[0] in NAMED.values():
        return tuple(getattr(suite.env_dict, f"{tasks[0]}_V3"))
    return tuple(name if name.endswith("-v3") else f"{name}-v3" for name in tasks)


def tasks_option(tasks: list[str]) -> str:
    """Return the value of the command line's option for a set's name or names of tasks."""
    return tasks[0] if len(tasks) == 1 else json.dumps(tasks)


def metaworld_vector(tasks: list[str], strategy: Strategy, seed: int = 1) -> gym.vector.VectorEnv:
    """Make Gymnasium's vector environment of MetaWorld's environments, as MetaWorld makes it.

    It has our protocol: reward v2, horizon 500, 50 goals per task, same-step autoreset.
    """
    names = names_of(tasks)
    options: dict[str, Any] = {"vector_strategy": strategy, "seed": seed}
    if len(tasks) == 1 and tasks[0] in NAMED.values():
        return gym.make_vec(f"Meta-World/{tasks[0]}", **options)
    return gym.make_vec("Meta-World/custom-mt-envs", envs_list=list(names), **options)


def one_hot_makers(
    tasks: list[str], environments: str, envs_per_task: int, horizon: int, seed: int = 1
) -> list[Callable[[], gym.Env]]:
    """Return functions that make training environments with the task's one-hot.

    Args:
        tasks: a set or names.
        environments: one of ``ENVIRONMENTS``.
        envs_per_task: environments of each task, which follow one another.
        horizon: steps of an episode.
        seed: of each task's first environment; the next one has the next seed.
    """
    make = _make_metaworld if environments == "metaworld" else _make_ours
    names = names_of(tasks)
    return [
        partial(make, names, index, horizon, seed + copy)
        for index in range(len(names))
        for copy in range(envs_per_task)
    ]


def _make_metaworld(names: tuple[str, ...], index: int, horizon: int, seed: int) -> gym.Env:
    return import_optional("metaworld", "metaworld").make_mt_envs(
        names[index],
        seed=seed,
        use_one_hot=True,
        env_id=index,
        num_tasks=len(names),
        max_episode_steps=horizon,
    )


def _make_ours(names: tuple[str, ...], index: int, horizon: int, seed: int) -> gym.Env:
    with_one_hot = import_optional("metaworld.wrappers", "metaworld").OneHotWrapper
    benchmark = MetaWorld(list(names), horizon=horizon)
    return with_one_hot(benchmark.make_env(index, "train", seed), index, len(names))


# ---- the DeepMind Control Suite ----


def suite_vector(benchmark: SuiteTasks, strategy: Strategy) -> gym.vector.VectorEnv:
    """Make Gymnasium's vector environment of Shimmy's wrapper of dm_control's tasks.

    Gymnasium needs one space for all: smaller observations and actions are padded, as ours are, and
    actions lie in [-1, 1]. The quadruped, which dm_control 1.0.28 cannot step with NumPy 2.4, and
    the families, which it does not have, are dm_control's ``Environment`` as our benchmarks load
    them.

    Args:
        benchmark: the tasks, with dm_control's own code (``fast=False``) and no action repeat.
        strategy: where the environments are stepped.
    """
    makers = [partial(_make_suite_env, benchmark, name) for name in benchmark.spec.task_names]
    kind = gym.vector.SyncVectorEnv if strategy == "sync" else gym.vector.AsyncVectorEnv
    return kind(makers, observation_mode="different", autoreset_mode=AutoresetMode.SAME_STEP)


def _make_suite_env(benchmark: SuiteTasks, name: str) -> gym.Env:
    shimmy = import_optional("shimmy.dm_control_compatibility", "bench")
    domain, _, task = name.partition("-")
    if isinstance(benchmark, DMControl) and domain != "quadruped":
        loaded = import_suite().load(domain, task)
    else:
        loaded = benchmark.load(name)
    env: gym.Env = FlattenObservation(shimmy.DmControlCompatibilityV0(loaded))
    bounds = env.action_space
    assert isinstance(bounds, Box)
    if not (np.all(bounds.low == -1) and np.all(bounds.high == 1)):  # the quadruped
        env = RescaleAction(env, np.float32(-1), np.float32(1))
    return pad_to_spec(env, benchmark.spec)
