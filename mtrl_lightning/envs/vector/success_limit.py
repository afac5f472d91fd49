"""Training episodes that end some steps after their first success."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy.typing as npt

from mtrl_lightning.envs.step_values import read_success


class SuccessLimit(gym.Wrapper):
    """Truncate an episode some steps after its first success.

    A test episode counts as successful with success in any step: what follows need not be learned,
    and the steps are more useful in further episodes. The episode is truncated, so that targets
    bootstrap from the value of the last state. This value is extrapolated from the few steps
    before, because no later states are seen: with 2 or 5 steps, PPO on ``ToyReach`` learned to
    avoid the goals, with 10 and 20 to reach them.

    Args:
        env: the environment, which reports ``success`` in its ``info``.
        num_steps: number of steps after the first success, at least 0.
    """

    def __init__(self, env: gym.Env, num_steps: int) -> None:
        super().__init__(env)
        self._num_steps = num_steps
        self._num_left: int | None = None
        """Remaining steps; None before a success."""

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Start an episode."""
        self._num_left = None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; truncate the episode if no steps remain."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._num_left is not None:
            self._num_left -= 1
        elif read_success(info):
            self._num_left = self._num_steps
        is_over = self._num_left is not None and self._num_left <= 0
        return observation, reward, terminated, truncated or is_over, info
