"""A listener of episodes that the command line names, too."""

import random

import numpy as np
import torch

from mtrl_lightning.rollout import EpisodeListener


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
