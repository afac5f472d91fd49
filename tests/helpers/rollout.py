"""A listener and an action transform that the command line names, too, and finished episodes."""

from __future__ import annotations

import random

import numpy as np
import torch

from mtrl_lightning.rollout import ActionTransform, EpisodeListener, EpisodeWindows
from mtrl_lightning.transitions import Episode


class Diary(EpisodeListener):
    """Counts finished episodes in checkpoints, and draws from the global generators."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.drawn: list[float] = []

    def on_episode_ended(self, env, episode):
        self.num_ended += 1
        self.drawn = [torch.rand(()).item(), np.random.rand(), random.random()]

    def state_dict(self):
        return {"num_ended": self.num_ended, "drawn": self.drawn}

    def load_state_dict(self, state):
        self.num_ended, self.drawn = state["num_ended"], state["drawn"]


class Scale(ActionTransform):
    """Multiplies the actions that are sent."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def transform(self, action_EA, task_E, is_training):
        return self._factor * action_EA


def windows_with(*success_of_task: float, num_episodes: int = 20) -> EpisodeWindows:
    """Return the windows after episodes of which a fraction has succeeded, the last ones."""
    windows = EpisodeWindows(len(success_of_task), 50)
    for task, success in enumerate(success_of_task):
        successes = np.arange(num_episodes) >= num_episodes * (1 - success)
        windows.add(Episode(task, 0.0, 10, bool(s), bool(s), env=100 + task) for s in successes)
    return windows
