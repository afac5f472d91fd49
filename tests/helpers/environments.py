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


def toy_step(observation_ED, action_EA, task_E, num_tasks=3):
    """The next observations and the rewards that the dynamics of ``ToyReach`` give."""
    angle_E = 2 * np.pi * np.asarray(task_E) / num_tasks
    goal_ED = 0.7 * np.stack([np.cos(angle_E), np.sin(angle_E)], axis=1)
    next_ED = np.clip(observation_ED.astype(np.float64) + 0.2 * np.clip(action_EA, -1, 1), -1, 1)
    return next_ED, 1 - np.linalg.norm(next_ED - goal_ED, axis=1)
