"""MetaWorld as its own package and Gymnasium offer it, and with this package's goals."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import gymnasium as gym

from mtrl_lightning.envs import MetaWorld
from mtrl_lightning.errors import ConfigurationError, import_optional

NAMED = {10: "MT10", 25: "MT25", 50: "MT50"}
"""MetaWorld's sets of tasks, by their size."""


def names_of(tasks: list[str]) -> tuple[str, ...]:
    """Return the names of the tasks of a set, such as ``["MT10"]``, or of those named one by one.

    Raises:
        ConfigurationError: if MetaWorld is missing or has no such task.
    """
    suite = import_optional("metaworld", "metaworld")
    if len(tasks) == 1 and tasks[0] in NAMED.values():
        return tuple(getattr(suite.env_dict, f"{tasks[0]}_V3"))
    names = tuple(name if name.endswith("-v3") else f"{name}-v3" for name in tasks)
    unknown = [name for name in names if name not in suite.ALL_V3_ENVIRONMENTS]
    if unknown:
        raise ConfigurationError(
            f"MetaWorld has no task {unknown[0]}: give {', '.join(NAMED.values())}, or names"
        )
    return names


def tasks_option(tasks: list[str]) -> str:
    """Return the value of the command line's option for a set's name or names of tasks."""
    return tasks[0] if len(tasks) == 1 else json.dumps(tasks)


def make_vec(
    tasks: list[str], strategy: Literal["sync", "async"], use_one_hot: bool = False, seed: int = 1
) -> gym.vector.VectorEnv:
    """Make Gymnasium's ``SyncVectorEnv`` or ``AsyncVectorEnv`` of MetaWorld's environments.

    They are made as MetaWorld makes them and have our protocol: reward v2, horizon 500, 50 goals
    a task, same-step autoreset.
    """
    import_optional("metaworld", "metaworld")
    options: dict[str, Any] = {
        "vector_strategy": strategy,
        "seed": seed,
        "use_one_hot": use_one_hot,
    }
    if len(tasks) == 1 and tasks[0] in NAMED.values():
        return gym.make_vec(f"Meta-World/{tasks[0]}", **options)
    return gym.make_vec("Meta-World/custom-mt-envs", envs_list=list(names_of(tasks)), **options)


def make_sb3(
    tasks: list[str],
    strategy: Literal["dummy", "subproc"],
    seed: int = 1,
    copies: int = 1,
    horizon: int = 500,
) -> Any:
    """Make Stable-Baselines3's vector environment of them, with the one-hot.

    Args:
        tasks: a set or names.
        strategy: ``dummy`` for ``DummyVecEnv``, ``subproc`` for ``SubprocVecEnv``.
        seed: of each task's first copy; the next one has the next seed.
        copies: of each task's environment.
        horizon: steps of an episode.
    """
    import_optional("metaworld", "metaworld")
    names = names_of(tasks)
    makers = [
        partial(_make_one, name, i, len(names), seed + copy, horizon)
        for i, name in enumerate(names)
        for copy in range(copies)
    ]
    return sb3_vector(makers, strategy)


def one_hot_makers(
    tasks: list[str], copies: int, horizon: int, fast: bool, seed: int = 1
) -> list[Callable[[], gym.Env]]:
    """Return what makes this package's training environments, with the one-hot.

    They have the goals of our benchmark, which the evaluation has, too.

    Args:
        tasks: a set or names.
        copies: of each task's environment.
        horizon: steps of an episode.
        fast: step with our code instead of MetaWorld's own.
        seed: of each task's first copy; the next one has the next seed.
    """
    return [
        partial(_make_one_hot, names_of(tasks), horizon, fast, place, seed + copy)
        for place in range(len(names_of(tasks)))
        for copy in range(copies)
    ]


def _make_one_hot(
    names: tuple[str, ...], horizon: int, fast: bool, place: int, seed: int
) -> gym.Env:
    with_one_hot = import_optional("metaworld.wrappers", "metaworld").OneHotWrapper
    env = MetaWorld(list(names), horizon=horizon, fast=fast).make_env(place, "train", seed)
    return with_one_hot(env, place, len(names))


def sb3_vector(
    makers: Sequence[Callable[[], gym.Env]], strategy: Literal["dummy", "subproc"]
) -> Any:
    """Return Stable-Baselines3's ``DummyVecEnv`` or ``SubprocVecEnv``."""
    vec_env = import_optional("stable_baselines3", '"mtrl_lightning[bench]"').common.vec_env
    return (vec_env.DummyVecEnv if strategy == "dummy" else vec_env.SubprocVecEnv)(makers)


def _make_one(name: str, place: int, number: int, seed: int, horizon: int) -> gym.Env:
    make_mt_envs = import_optional("metaworld", "metaworld").make_mt_envs
    return make_mt_envs(
        name,
        seed=seed,
        use_one_hot=True,
        env_id=place,
        num_tasks=number,
        max_episode_steps=horizon,
    )
