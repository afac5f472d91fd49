"""The layers of an environment."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium as gym


def layers_of(env: gym.Env) -> Iterator[gym.Env]:
    """Yield the environment's wrappers and itself, the outermost layer first."""
    yield env
    while isinstance(env, gym.Wrapper):
        env = env.env
        yield env
