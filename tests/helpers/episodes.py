"""Finished episodes."""

from __future__ import annotations

import numpy as np

from mtrl_lightning.rollout import EpisodeWindows
from mtrl_lightning.transitions import Episode


def windows_with(*success_of_task: float, num_episodes: int = 20) -> EpisodeWindows:
    """Return the windows after episodes of which a fraction has succeeded, the last ones."""
    windows = EpisodeWindows(len(success_of_task), 50)
    for task, success in enumerate(success_of_task):
        successes = np.arange(num_episodes) >= num_episodes * (1 - success)
        windows.add(Episode(task, 0.0, 10, bool(s), bool(s), env=100 + task) for s in successes)
    return windows
