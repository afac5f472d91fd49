"""Step vector environments, and keep their states in a file.

Worker processes import this: no torch.
"""

from __future__ import annotations

import io

import numpy as np


def through_a_file(state):
    """The state as a checkpoint gives it back."""
    import torch

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def draw(envs, num_steps):
    """Actions of all environments, ``[num_steps, E, A]``; the same ones in every call."""
    shape = (num_steps, *envs.action_space.shape)
    return np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)


def run(envs, action_SEA):
    """The result of every step."""
    results = []
    for action_EA in action_SEA:
        envs.send(action_EA)
        results.append(envs.receive())
    return results
