"""MetaWorld whose training environments fail at random steps, to measure what a run survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from mtrl_lightning.envs.benchmarks.metaworld import MetaWorld

KINDS = ("nan", "infinite", "raise")
"""A NaN in the observation, an infinite reward, an exception."""


class FaultyMetaWorld(MetaWorld):
    """MetaWorld with faults at random steps.

    A rebuilt environment draws new ones, so that no fault repeats forever.

    Args:
        ledger: folder where every fault leaves a file; made if it is missing.
        limit: faults of all environments together, over all sessions of a run.
        within: a fault comes at a step from 1 to this one after the last, drawn uniformly.
        **kwargs: those of ``MetaWorld``.
    """

    def __init__(self, ledger: str, limit: int, within: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ledger = ledger
        self.limit = limit
        self.within = within

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make an environment; those of other splits than ``train`` never break."""
        env = super().make_env(task, split, seed)
        if split != "train":
            return env
        return _Faulty(env, self.task_names[task], self.ledger, self.limit, self.within, seed)


class _Faulty(gym.Wrapper):
    """Break when the steps that were drawn are over."""

    def __init__(
        self, env: gym.Env, task: str, ledger: str, limit: int, within: int, seed: int
    ) -> None:
        super().__init__(env)
        self._task = task
        self._ledger = ledger
        self._limit = limit
        self._within = within
        self._draw(seed)

    def _draw(self, seed: int) -> None:
        self._left = int(np.random.default_rng(seed).integers(1, self._within + 1))

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; a seed also decides when the next fault comes."""
        if seed is not None:
            self._draw(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step, or break."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._left -= 1
        kind = claim(self._ledger, self._limit, self._task) if self._left == 0 else None
        if kind == "raise":
            raise RuntimeError("a fault for measuring")
        if kind == "nan":
            observation = np.array(observation)
            observation[3] = np.nan
        return observation, np.inf if kind == "infinite" else reward, terminated, truncated, info


def claim(ledger: str, limit: int, task: str) -> str | None:
    """Add a fault to the ledger shared by all processes; return its kind, None if none is left."""
    folder = Path(ledger)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(limit):
        kind = KINDS[i % len(KINDS)]
        try:
            with (folder / f"{i:04d}").open("x") as file:
                file.write(f"{task} {kind}\n")
        except FileExistsError:
            continue
        return kind
    return None
