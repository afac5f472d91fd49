"""Play environments, and take them through a file."""

from __future__ import annotations

import io

import numpy as np
import torch

HORIZON = 8


def through_a_file(state):
    """The state as a checkpoint gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def future(env, num_steps=2 * HORIZON, seed=0):
    """All that can be seen of the next steps, over the ends of episodes."""
    seen, generator = [], np.random.default_rng(seed)
    size = env.action_space.shape
    for _ in range(num_steps):
        observation, reward, terminated, truncated, info = env.step(
            generator.uniform(-1, 1, size).astype(np.float32)
        )
        numbers = {
            name: float(v)
            for name, v in info.items()
            if isinstance(v, (bool, int, float, np.generic))
        }
        seen.append(
            (
                observation.tobytes(),
                observation.dtype,
                float(reward),
                terminated,
                truncated,
                numbers,
            )
        )
        if terminated or truncated:
            seen.append(env.reset()[0].tobytes())
    return seen


def play(env, num_steps, seed):
    generator = np.random.default_rng(seed)
    for _ in range(num_steps):
        env.step(generator.uniform(-1, 1, env.action_space.shape).astype(np.float32))


def numbers():
    yield from range(5)
