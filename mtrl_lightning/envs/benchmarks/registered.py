"""Environments that files of ``configs/env`` name, registered in Gymnasium.

``gymnasium.make("mtrl_lightning.envs.benchmarks.registered:CartPoleLength-v0", length=1.0)``
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

from mtrl_lightning.checks import above


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


gym.register("CartPoleLength-v0", CartPoleLength, max_episode_steps=500)
