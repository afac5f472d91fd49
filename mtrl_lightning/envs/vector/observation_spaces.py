"""Which observation spaces can be learned from, and what to do about the others."""

from __future__ import annotations

import gymnasium as gym
from gymnasium.spaces import Box, Dict, Tuple

FLATTEN = "gymnasium.wrappers.FlattenObservation"


def what_is_wrong(space: gym.Space) -> str | None:
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
            hint = f"wrap the environment in {FLATTEN}, which makes one Box of it"
        else:
            listed = ", ".join(f"{name} {part}" for name, part in others.items())
            problem = f"not all of it are Boxes of numbers: {listed}"
            hint = (
                "leave these out (gymnasium.wrappers.FilterObservation), or turn them into numbers"
                f" ({FLATTEN} does so with discrete ones, as one-hot vectors;"
                " gymnasium.wrappers.TransformObservation with any)"
            )
        return f"its observation space is {space}, and {problem}: {hint}"
    return (
        f"its observation space is {space}; observations must be a Box, or a Dict or Tuple of"
        f" boxes: wrap the environment in {FLATTEN}"
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
