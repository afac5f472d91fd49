"""Checks that observation and action spaces are supported, with hints on how to wrap others."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple
from gymnasium.wrappers import TransformAction

from mtrl_lightning.spec import chosen


def wrong_observations(space: gym.Space) -> str | None:
    """Return why an observation space is not supported, and what to do; None if it is.

    Algorithms need a ``Box``. Dictionaries and tuples of boxes are flattened to one.
    """
    if isinstance(space, Box) or can_be_flattened(space):
        return None
    return (
        f"its observation space is {space}, but must be a Box, or a Dict or Tuple of boxes: wrap"
        " the environment in gymnasium.wrappers.FlattenObservation, or remove the other parts"
        " (gymnasium.wrappers.FilterObservation)"
    )


def can_be_flattened(space: gym.Space) -> bool:
    """Return whether a space is a dictionary or tuple of boxes, which can be flattened."""
    if not isinstance(space, (Dict, Tuple)):
        return False
    parts = [*space.values()] if isinstance(space, Dict) else [*space]
    return len(parts) > 0 and all(isinstance(part, Box) for part in parts)


def wrong_actions(space: gym.Space) -> str | None:
    """Return why an action space is not supported, and what to do; None if it is.

    Algorithms need continuous action vectors, a one-dimensional ``Box``.
    """
    if isinstance(space, Discrete) or (isinstance(space, MultiDiscrete) and space.nvec.ndim == 1):
        return (
            f"its action space is {space}: environments of a benchmark take one-hot rows, and its"
            " spec has action_choices (GymnasiumTasks wraps environments accordingly)"
        )
    is_vector = isinstance(space, Box) and len(space.shape) == 1
    if is_vector and np.issubdtype(space.dtype, np.floating):
        return None
    return (
        f"its action space is {space}, but must be a one-dimensional Box of floats, Discrete or"
        " MultiDiscrete: wrap the environment in gymnasium.wrappers.TransformAction, which maps"
        " such actions to its own, those of boxes with gymnasium.spaces.unflatten"
    )


def with_one_hot_actions(env: gym.Env) -> tuple[gym.Env, tuple[int, ...]]:
    """Return the environment with one-hot actions, and the number of choices of each component.

    The largest entry is taken, so any scores are actions. Without discrete actions, the environment
    is returned as it is, and no choices.
    """
    space = env.action_space
    if isinstance(space, Discrete):
        choices: tuple[int, ...] = (int(space.n),)
    elif isinstance(space, MultiDiscrete) and space.nvec.ndim == 1:
        choices = tuple(space.nvec.tolist())
    else:
        return env, ()
    one_hot = Box(-1.0, 1.0, (sum(choices),), np.float32)
    choose = partial(_index, start=space.start, choices=choices)
    return TransformAction(env, choose, one_hot), choices


def _index(score_A: npt.NDArray, start: Any, choices: tuple[int, ...]) -> Any:
    return start + chosen(score_A, choices)
