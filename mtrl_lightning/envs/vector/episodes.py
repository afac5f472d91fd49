"""Replayable episodes: each is a function of its seed and its actions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from mtrl_lightning.envs.vector.midway_starts import MidwayStarts


def episode_seed(seed: int, number: int) -> int:
    """Return the seed of an environment's training episode.

    Args:
        seed: seed of the environment, with which its first episode is reset.
        number: index of the episode, starting at 0.
    """
    if number == 0:
        return seed
    return int(np.random.SeedSequence((seed, number)).generate_state(1)[0])


class Episodes(gym.Wrapper):
    """Reset every episode with its own seed, and record its actions.

    Args:
        env: the environment, not yet reset.
        seed: determines the seeds of all training episodes.
        is_numbered: whether seeds are indices of test episodes, and each further reset starts the
            next one.
    """

    def __init__(self, env: gym.Env, seed: int, is_numbered: bool) -> None:
        super().__init__(env)
        self._midway = env if isinstance(env, MidwayStarts) else None
        self._is_numbered = is_numbered
        self._seed = 0 if is_numbered else seed
        self._number = -1
        """Index of the current episode; -1 before the first."""
        self._actions: list[npt.NDArray] = []
        """Actions of the current episode."""

    @property
    def num_steps(self) -> int:
        """Number of steps of the current episode."""
        return len(self._actions)

    @property
    def is_midway(self) -> bool:
        """Whether the current episode started midway in an earlier one."""
        return self._midway is not None and self._midway.is_midway

    @property
    def repeated_steps(self) -> int:
        """Number of steps replayed to start episodes midway in earlier ones."""
        return 0 if self._midway is None else self._midway.repeated_steps

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episode, or the first one of a new seed."""
        if seed is not None:
            self._seed = seed
            self._number = -1
            if self._midway is not None:
                self._midway.forget()
        self._number += 1
        return self._begin(options)

    def step(self, action: npt.NDArray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, and record the action."""
        self._actions.append(action.copy())  # an environment may modify its argument
        return self.env.step(action)

    def get_state(self) -> dict[str, Any]:
        """Return the current episode's seed and actions as plain values."""
        return {
            "seed": self._seed,
            "number": self._number,
            "actions": [action.tolist() for action in self._actions],
            "midway": None if self._midway is None else self._midway.get_state(),
        }

    def repeat(self, state: dict[str, Any]) -> Any:
        """Replay an episode; return its last observation, or None if there is none."""
        self._seed = state["seed"]
        self._number = state["number"]
        if self._midway is not None and state["midway"] is not None:
            self._midway.set_state(state["midway"])
        if self._number < 0:
            return None
        observation, _ = self._begin()
        for action in state["actions"]:
            observation, _, terminated, truncated, _ = self.step(np.array(action, np.float32))
            if terminated or truncated:
                return None
        return observation

    def _begin(self, options: dict | None = None) -> tuple[Any, dict[str, Any]]:
        self._actions = []
        seed = self._seed + self._number
        if not self._is_numbered:
            seed = episode_seed(self._seed, self._number)
        return self.env.reset(seed=seed, options=options)
