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

FLATTEN_OBSERVATIONS = "gymnasium.wrappers.FlattenObservation"
FLATTEN_ACTIONS = (
    "gymnasium.wrappers.TransformAction(env,"
    " lambda action: gymnasium.spaces.unflatten(env.action_space, action),"
    " gymnasium.spaces.flatten_space(env.action_space))"
)
"""Code that wraps an environment to flatten its actions."""


def wrong_observations(space: gym.Space) -> str | None:
    """Return why an observation space is not supported, and what to do; None if it is.

    Algorithms need a ``Box``. Dictionaries and tuples of boxes are flattened to one.
    """
    if isinstance(space, Box) or can_be_flattened(space):
        return None
    if isinstance(space, (Dict, Tuple)):
        parts = _parts(space)
        nested = [name for name, part in parts.items() if isinstance(part, (Dict, Tuple))]
        others = {name: part for name, part in parts.items() if not isinstance(part, Box)}
        if nested:
            problem = f"{', '.join(nested)} in it is a nested dictionary or tuple"
            hint = f"wrap the environment in {FLATTEN_OBSERVATIONS}, which returns a single Box"
        else:
            listed = ", ".join(f"{name} {part}" for name, part in others.items())
            problem = f"not all of it are Boxes of numbers: {listed}"
            hint = (
                "remove these (gymnasium.wrappers.FilterObservation), or convert them to numbers"
                f" ({FLATTEN_OBSERVATIONS} converts discrete ones to one-hot vectors;"
                " gymnasium.wrappers.TransformObservation any)"
            )
        return f"its observation space is {space}, but {problem}: {hint}"
    return (
        f"its observation space is {space}, but must be a Box, or a Dict or Tuple of boxes: wrap"
        f" the environment in {FLATTEN_OBSERVATIONS}"
    )


def can_be_flattened(space: gym.Space) -> bool:
    """Return whether a space is a dictionary or tuple of boxes, which can be flattened."""
    if not isinstance(space, (Dict, Tuple)):
        return False
    parts = _parts(space).values()
    return len(parts) > 0 and all(isinstance(part, Box) for part in parts)


def _parts(space: Dict | Tuple) -> dict[str, gym.Space]:
    if isinstance(space, Dict):
        return dict(space.items())
    return {f"part {index}": part for index, part in enumerate(space)}


def wrong_actions(space: gym.Space) -> str | None:
    """Return why an action space is not supported, and what to do; None if it is.

    Algorithms need continuous action vectors, a one-dimensional ``Box``.
    """
    if isinstance(space, Box) and not np.issubdtype(space.dtype, np.floating):
        return (
            f"its action space is {space}, but algorithms need continuous actions: wrap the"
            " environment so that it accepts a Box of floats and rounds them"
            " (gymnasium.wrappers.TransformAction)"
        )
    if isinstance(space, Box) and len(space.shape) == 1:
        return None
    if isinstance(space, Box):
        return (
            f"its action space is {space}, with {len(space.shape)} axes, but algorithms need"
            f" vectors: wrap the environment in {FLATTEN_ACTIONS}"
        )
    if isinstance(space, Discrete) or (isinstance(space, MultiDiscrete) and space.nvec.ndim == 1):
        return (
            f"its action space is {space}: environments of a benchmark take one-hot rows, and its"
            " spec has action_choices (GymnasiumTasks wraps environments accordingly)"
        )
    if isinstance(space, (Dict, Tuple)):
        if all(isinstance(leaf, Box) for leaf in leaves(space)):
            hint = f"wrap the environment in {FLATTEN_ACTIONS}"
        else:
            hint = (
                "wrap the environment so that it accepts a single Box and maps it to the parts"
                " (gymnasium.wrappers.TransformAction)"
            )
        return (
            f"its action space is {space}, but algorithms need a single continuous vector: {hint}"
        )
    return (
        f"its action space is {space}: actions must be a one-dimensional Box, Discrete or"
        " MultiDiscrete"
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


def leaves(space: gym.Space) -> list[gym.Space]:
    """Return the leaf spaces of nested dictionaries and tuples of spaces."""
    if isinstance(space, Dict):
        inner = list(space.values())
    elif isinstance(space, Tuple):
        inner = list(space)
    else:
        return [space]
    return [leaf for part in inner for leaf in leaves(part)]
