"""Padding of observations and actions of different sizes to the largest in a benchmark.

Shapes: ``D`` padded observation, ``A`` padded action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box
from gymnasium.utils import RecordConstructorArgs

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec


class Padded(gym.Wrapper, RecordConstructorArgs):
    """Pad observations with zeros, and remove the padding of actions.

    Args:
        env: the environment.
        observation_size: size of the padded observation, ``D``, at least the environment's own;
            None to leave observations, such as images, unchanged.
        action_size: size of the padded action, ``A``, at least the environment's own; None to leave
            actions unchanged. Padding entries of an action lie between -1 and 1 and have no effect.
    """

    def __init__(self, env: gym.Env, observation_size: int | None, action_size: int | None) -> None:
        # required for the environment to have a spec
        RecordConstructorArgs.__init__(
            self, observation_size=observation_size, action_size=action_size
        )
        gym.Wrapper.__init__(self, env)
        self._padding: npt.NDArray | None = None
        if observation_size is not None:
            observations = _vector(env.observation_space, "observation", observation_size)
            self._padding = np.zeros(observation_size - observations.shape[0], observations.dtype)
            self.observation_space = _padded_box(observations, observation_size, 0.0, 0.0)
        self._own_action_size: int | None = None
        if action_size is not None:
            actions = _vector(env.action_space, "action", action_size)
            self._own_action_size = actions.shape[0]
            self.action_space = _padded_box(actions, action_size, -1.0, 1.0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Start an episode; return its padded observation."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._padded(observation), info

    def step(self, action: npt.NDArray) -> tuple[npt.NDArray, Any, bool, bool, dict[str, Any]]:
        """Step with the unpadded action; return the padded observation."""
        observation, *rest = self.env.step(action[: self._own_action_size])
        return self._padded(observation), *rest  # type: ignore[return-value]

    def _padded(self, observation: npt.NDArray) -> npt.NDArray:
        return observation if self._padding is None else np.append(observation, self._padding)


def pad_to_spec(env: gym.Env, spec: EnvSpec) -> gym.Env:
    """Pad the environment to a spec's spaces; return it unchanged if no task is padded."""
    observation_size = spec.observation_space.shape[0] if spec.observation_sizes else None
    action_size = spec.action_space.shape[0] if spec.action_sizes else None
    if observation_size is None and action_size is None:
        return env
    return Padded(env, observation_size, action_size)


def without_padding(env: gym.Env) -> gym.Env:
    """Return the environment without ``Padded`` layers."""
    layer = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer.env, Padded):
            layer.env = layer.env.env
        else:
            layer = layer.env
    return env.env if isinstance(env, Padded) else env


class PaddedSpaces(NamedTuple):
    """Common spaces of tasks of different sizes, and each task's own sizes."""

    observation_space: Box
    action_space: Box
    observation_sizes: tuple[int, ...]
    """Size of each task's own observation; empty without padding."""
    action_sizes: tuple[int, ...]
    """Size of each task's own action; empty without padding."""


def padded_spaces(spaces: Mapping[str, tuple[Box, Box]]) -> PaddedSpaces:
    """Return the smallest spaces that contain the padded observations and actions of all tasks.

    Tasks with equal spaces keep them, even if they are not vectors.

    Args:
        spaces: observation and action space of each task's environment, by task name.
    """
    observation_space, observation_sizes = _common(
        {name: observations for name, (observations, _) in spaces.items()}, "observation", 0.0, 0.0
    )
    action_space, action_sizes = _common(
        {name: actions for name, (_, actions) in spaces.items()}, "action", -1.0, 1.0
    )
    return PaddedSpaces(observation_space, action_space, observation_sizes, action_sizes)


def _common(
    spaces: Mapping[str, Box], kind: str, low: float, high: float
) -> tuple[Box, tuple[int, ...]]:
    (first, expected), *others = spaces.items()
    for name, space in others:
        if space != expected and not len(space.shape) == len(expected.shape) == 1:
            raise ConfigurationError(
                f"the {kind} spaces of the tasks differ: {first!r} has {expected}, {name!r} has"
                f" {space}. Only vectors are padded: wrap the environments to make them equal, or"
                " in gymnasium.wrappers.FlattenObservation"
            )
    if all(space == expected for space in spaces.values()):
        return expected, ()
    sizes = tuple(space.shape[0] for space in spaces.values())
    padded = [_padded_box(space, max(sizes), low, high) for space in spaces.values()]
    dtype = np.result_type(*(space.dtype for space in padded))
    joined = Box(
        np.min([space.low for space in padded], axis=0).astype(dtype),
        np.max([space.high for space in padded], axis=0).astype(dtype),
        dtype=dtype.type,
    )
    return joined, sizes if len(set(sizes)) > 1 else ()


def _vector(space: gym.Space, kind: str, size: int) -> Box:
    if not (isinstance(space, Box) and len(space.shape) == 1):
        raise ConfigurationError(
            f"the environment's {kind} space is {space}: only vectors can be padded"
        )
    if space.shape[0] > size:
        raise ConfigurationError(
            f"the environment's {kind} space has {space.shape[0]} numbers, but {kind}_size is"
            f" {size}: give at least {space.shape[0]}"
        )
    return space


def _padded_box(space: Box, size: int, low: float, high: float) -> Box:
    """Extend a box with entries between ``low`` and ``high``."""
    missing = size - space.shape[0]
    if missing == 0:
        return space
    return Box(
        np.append(space.low, np.full(missing, low, space.dtype)),
        np.append(space.high, np.full(missing, high, space.dtype)),
        dtype=space.dtype.type,  # type: ignore[arg-type]
    )
