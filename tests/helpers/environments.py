"""Step vector environments, and keep their states in a file.

Worker processes import this: no torch.
"""

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


def assert_toy_steps(observation_ED, action_EA, reward_E, next_observation_ED, task_E):
    """Compare steps of ``ToyReach`` with three tasks with its dynamics."""
    angle_E = 2 * np.pi * task_E / 3
    goal_ED = 0.7 * np.stack([np.cos(angle_E), np.sin(angle_E)], axis=1)
    next_ED = np.clip(observation_ED.astype(np.float64) + 0.2 * np.clip(action_EA, -1, 1), -1, 1)
    np.testing.assert_allclose(next_observation_ED, next_ED, rtol=0, atol=3e-7)
    distance_E = np.linalg.norm(next_ED - goal_ED, axis=1)
    np.testing.assert_allclose(reward_E, 1 - distance_E, rtol=0, atol=5e-7)
