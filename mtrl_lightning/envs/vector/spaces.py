"""Checks that observation and action spaces are supported, with hints on how to wrap others."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

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
    if isinstance(space, Discrete):
        start = f" + {space.start}" if space.start else ""
        choose = f"lambda action: int(action.argmax()){start}"
        return (
            f"its action space is {space}, but only continuous actions (a Box) are supported:"
            f" wrap the environment so that it accepts {space.n} numbers and uses the largest,"
            f" gymnasium.wrappers.TransformAction(env, {choose},"
            f" gymnasium.spaces.Box(-1, 1, ({space.n},)))"
        )
    if isinstance(space, (MultiBinary, MultiDiscrete)):
        return (
            f"its action space is {space}, but only continuous actions (a Box) are supported:"
            " wrap the environment so that it accepts a Box and maps it to its actions"
            " (gymnasium.wrappers.TransformAction)"
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
        f"its action space is {space}, but only continuous actions are supported: wrap the"
        " environment so that it accepts a one-dimensional gymnasium.spaces.Box"
    )


def leaves(space: gym.Space) -> list[gym.Space]:
    """Return the leaf spaces of nested dictionaries and tuples of spaces."""
    if isinstance(space, Dict):
        inner = list(space.values())
    elif isinstance(space, Tuple):
        inner = list(space)
    else:
        return [space]
    return [leaf for part in inner for leaf in leaves(part)]
