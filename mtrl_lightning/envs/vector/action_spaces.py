"""Which action spaces can be learned, and what to do about the others."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

FLATTEN = (
    "gymnasium.wrappers.TransformAction(env,"
    " lambda action: gymnasium.spaces.unflatten(env.action_space, action),"
    " gymnasium.spaces.flatten_space(env.action_space))"
)
"""Code that wraps an environment so that its actions are one row of numbers."""


def what_is_wrong(space: gym.Space) -> str | None:
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
            f" row of numbers: wrap the environment in {FLATTEN}"
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
            hint = f"wrap the environment in {FLATTEN}"
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
