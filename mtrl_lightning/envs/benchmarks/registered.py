"""Environments that files of ``configs/env`` name, registered in Gymnasium.

``gymnasium.make("mtrl_lightning.envs.benchmarks.registered:CartPoleLength-v0", length=1.0)``
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import FlattenObservation

from mtrl_lightning.checks import above
from mtrl_lightning.errors import import_optional


class CartPoleLength(CartPoleEnv):
    """Balance a pole on a cart, with two discrete actions.

    Args:
        length: half the length of the pole in meters, above 0; 0.5 in CartPole-v1.
        options: those of Gymnasium's environment.
    """

    def __init__(self, length: float = 0.5, **options: Any) -> None:
        above(0, length=length)
        super().__init__(**options)
        self.length = length
        self.polemass_length = self.masspole * length


def minigrid_view(name: str, **options: Any) -> gym.Env:
    """Make an environment of MiniGrid that observes what the agent sees.

    An observation has 147 bytes, the object, color and state of 7 x 7 cells. MiniGrid adds the
    agent's direction, which is always up in this view, and a sentence.

    Args:
        name: registered ID, such as MiniGrid-DoorKey-5x5-v0.
        options: those of the environment.
    """
    wrappers = import_optional("minigrid.wrappers", "minigrid")
    return FlattenObservation(wrappers.ImgObsWrapper(gym.make(name, **options)))


gym.register("CartPoleLength-v0", CartPoleLength, max_episode_steps=500)
gym.register("MiniGridView-v0", f"{__name__}:minigrid_view")
