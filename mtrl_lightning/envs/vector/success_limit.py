"""Training episodes that end some steps after their first success."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy.typing as npt

from mtrl_lightning.envs.step_values import read_success


class SuccessLimit(gym.Wrapper):
    """Truncate an episode some steps after its first success.

    A test episode succeeds with success in any step: what comes after it need not be learned, and
    the steps are of more use in further episodes. The end is a truncation, so that the value of the
    last state is bootstrapped. Nothing is learned from there on, so that its value is extrapolated
    from the few steps before: with 2 or 5 of them PPO on ``ToyReach`` learned to stay away from the
    goals, with 10 and 20 to reach them.

    Args:
        env: the environment, which reports ``success`` in its ``info``.
        num_steps: steps after the first one with success, at least 0.
    """

    def __init__(self, env: gym.Env, num_steps: int) -> None:
        super().__init__(env)
        self._num_steps = num_steps
        self._num_left: int | None = None
        """Steps until the end; None before a success."""

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Begin an episode."""
        self._num_left = None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; truncate where the steps after the first success are made."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._num_left is not None:
            self._num_left -= 1
        elif read_success(info):
            self._num_left = self._num_steps
        is_over = self._num_left is not None and self._num_left <= 0
        return observation, reward, terminated, truncated or is_over, info
