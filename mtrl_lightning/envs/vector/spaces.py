"""Which spaces of observations and actions can be learned, and what to do about the others."""

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
"""Code that wraps an environment so that its actions are one row of numbers."""


def wrong_observations(space: gym.Space) -> str | None:
    """Return why observations of a space cannot be used, and what to do; None if they can be.

    Algorithms take a ``Box``. Dictionaries and tuples of boxes are flattened to one.
    """
    if isinstance(space, Box) or can_be_flattened(space):
        return None
    if isinstance(space, (Dict, Tuple)):
        parts = _parts(space)
        nested = [name for name, part in parts.items() if isinstance(part, (Dict, Tuple))]
        others = {name: part for name, part in parts.items() if not isinstance(part, Box)}
        if nested:
            problem = f"{', '.join(nested)} in it is a dictionary or tuple itself"
            hint = f"wrap the environment in {FLATTEN_OBSERVATIONS}, which makes one Box of it"
        else:
            listed = ", ".join(f"{name} {part}" for name, part in others.items())
            problem = f"not all of it are Boxes of numbers: {listed}"
            hint = (
                "leave these out (gymnasium.wrappers.FilterObservation), or turn them into numbers"
                f" ({FLATTEN_OBSERVATIONS} does so with discrete ones, as one-hot vectors;"
                " gymnasium.wrappers.TransformObservation with any)"
            )
        return f"its observation space is {space}, and {problem}: {hint}"
    return (
        f"its observation space is {space}; observations must be a Box, or a Dict or Tuple of"
        f" boxes: wrap the environment in {FLATTEN_OBSERVATIONS}"
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
    """Return why actions of a space cannot be learned, and what to do; None if they can be.

    Algorithms here choose a row of continuous numbers, a ``Box`` of one axis.
    """
    if isinstance(space, Box) and not np.issubdtype(space.dtype, np.floating):
        return (
            f"its action space is {space}, and algorithms choose continuous numbers: wrap the"
            " environment so that it takes a Box of floats and rounds them"
            " (gymnasium.wrappers.TransformAction)"
        )
    if isinstance(space, Box) and len(space.shape) == 1:
        return None
    if isinstance(space, Box):
        return (
            f"its action space is {space}, with {len(space.shape)} axes, and algorithms choose a"
            f" row of numbers: wrap the environment in {FLATTEN_ACTIONS}"
        )
    if isinstance(space, Discrete):
        start = f" + {space.start}" if space.start else ""
        choose = f"lambda action: int(action.argmax()){start}"
        return (
            f"its action space is {space}, and only continuous actions (a Box) can be learned:"
            f" wrap the environment so that it takes {space.n} numbers and acts by the largest,"
            f" gymnasium.wrappers.TransformAction(env, {choose},"
            f" gymnasium.spaces.Box(-1, 1, ({space.n},)))"
        )
    if isinstance(space, (MultiBinary, MultiDiscrete)):
        return (
            f"its action space is {space}, and only continuous actions (a Box) can be learned:"
            " wrap the environment so that it takes a Box and chooses by its numbers"
            " (gymnasium.wrappers.TransformAction)"
        )
    if isinstance(space, (Dict, Tuple)):
        if all(isinstance(leaf, Box) for leaf in leaves(space)):
            hint = f"wrap the environment in {FLATTEN_ACTIONS}"
        else:
            hint = (
                "wrap the environment so that it takes one Box and makes the parts of its numbers"
                " (gymnasium.wrappers.TransformAction)"
            )
        return (
            f"its action space is {space}, and algorithms choose one row of continuous numbers:"
            f" {hint}"
        )
    return (
        f"its action space is {space}: only continuous actions, a gymnasium.spaces.Box of one axis,"
        " can be learned"
    )


def leaves(space: gym.Space) -> list[gym.Space]:
    """Return the spaces that a dictionary or tuple of spaces consists of, at any depth."""
    if isinstance(space, Dict):
        inner = list(space.values())
    elif isinstance(space, Tuple):
        inner = list(space)
    else:
        return [space]
    return [leaf for part in inner for leaf in leaves(part)]
