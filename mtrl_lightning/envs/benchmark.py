"""A benchmark: named tasks, and an environment for each."""

from __future__ import annotations

from abc import ABC, abstractmethod

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.envs.actions import what_is_wrong
from mtrl_lightning.envs.arrays import array_fields
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.types import EnvSpec


class Benchmark(ABC):
    """Tasks that share an observation and an action space.

    A benchmark is sent to worker processes: it holds plain values and functions, and imports its
    suite when it needs it.

    An environment of a task is a ``gymnasium.Env`` whose observation carries no task encoding. Its
    state is saved by ``EnvState``: all attributes of the environment and its wrappers, MuJoCo's
    state among them. A class with attributes that cannot or need not be saved has
    ``get_state() -> dict`` and ``set_state(dict)`` of plain values or arrays, which then answer for
    all of it; ``envs.simulator.MujocoState`` takes and restores a MuJoCo simulation for them. Where
    an environment's state cannot be saved, it starts a new episode after a resume. An environment
    draws from a generator of its own, never from a global one.

    ``reset(seed=s)`` determines everything that follows. In the split ``train`` it seeds the
    generator that draws initial states and goals. In every other split ``s`` is the number of the
    test episode: the same ``s`` always starts the same episode, and each further ``reset()`` the
    next one.
    """

    splits: tuple[str, ...] = ("train", "eval")
    """Names of the sets of environments; the first is trained on, the others are evaluated."""

    @property
    @abstractmethod
    def spec(self) -> EnvSpec:
        """What an algorithm needs to know."""

    @abstractmethod
    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make one environment.

        Args:
            task: the task's place in ``spec.task_names``.
            split: one of ``splits``.
            seed: of the environment's draws until it is reset with another seed.
        """


def check_spec(spec: EnvSpec) -> EnvSpec:
    """Return the spec if the package can work with it.

    Raises:
        ConfigurationError: if a task or a field appears twice, or actions are not bounded by -1
            and 1, or the spaces are not continuous.
    """
    wrong = what_is_wrong(spec.action_space)
    if wrong is not None:
        names = ", ".join(spec.task_names)
        raise ConfigurationError(f"the benchmark's spec (tasks {names}): {wrong}")
    if not isinstance(spec.observation_space, Box):
        raise ConfigurationError(
            f"the benchmark's observation space is {spec.observation_space}: observations must be a"
            " Box. Wrap the environments in gymnasium.wrappers.FlattenObservation"
        )
    duplicates = sorted({name for name in spec.task_names if spec.task_names.count(name) > 1})
    if duplicates:
        raise ConfigurationError(f"duplicate tasks {duplicates}: name each task once")
    if not (np.all(spec.action_space.low == -1) and np.all(spec.action_space.high == 1)):
        raise ConfigurationError(
            "actions must lie in [-1, 1]: wrap the environments in gymnasium.wrappers.RescaleAction"
        )
    fields = [field.name for field in array_fields(spec)]
    duplicates = sorted({name for name in fields if fields.count(name) > 1})
    if duplicates:
        raise ConfigurationError(
            f"info_fields name {duplicates} twice, or as a step already has: rename them"
        )
    return spec
