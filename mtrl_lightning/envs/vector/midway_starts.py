"""Training episodes that start where the agent's best ones came near a success."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.wrappers import TimeLimit

from mtrl_lightning.envs.layers import layers_of
from mtrl_lightning.envs.step_values import read_reward, read_success
from mtrl_lightning.envs.vector.global_random import GlobalRandom
from mtrl_lightning.spec import EnvSpec

INTERVAL = 10
"""Number of steps between two potential starting points in an episode."""
NUM_BEGINNINGS = 5
"""Number of beginnings that an environment keeps: those that led to the largest rewards."""
STEP_SIZE = 0.2
"""Weight of the newest episode in the average success."""
MOST_REPEATED = 4
"""Maximum length of beginnings in horizons. An episode that started midway may itself yield a
beginning, so that they may become longer than an episode."""


class Moment(NamedTuple):
    """A moment of the current episode."""

    num_steps: int
    """Number of steps since the reset, including replayed ones."""
    checksum: int
    """Checksum of the observation."""


@dataclass(eq=False)
class Beginning:
    """The first steps of an episode, which can be replayed."""

    reward: float
    """The largest reward that the episode reached afterwards, before it succeeded."""
    seeds: dict[int, int]
    """Seeds by number of steps: at 0 that of the reset, later those of the environment's noise."""
    action_SA: npt.NDArray
    """The actions of its first ``S`` steps."""
    checksum: int
    """Checksum of the observation after these steps."""
    num_successes: int = 0
    """Number of successes of the episodes that started from it."""


class MidwayStarts(gym.Wrapper):
    """Start some episodes midway, by replaying the first steps of a good earlier one.

    A state found once by chance, such as an object between the fingers, becomes the start of many
    episodes (Ecoffet et al. 2021, "First return, then explore", arXiv 2004.12919, where states are
    selected by visit counts; here by the rewards that followed). Beginnings end at most
    ``INTERVAL`` steps before an episode's largest reward. They are replayed from the seed of the
    reset and the actions, which requires environments whose episodes depend on nothing else; if a
    replay leads elsewhere, the episode starts with a reset instead. After the replay, the
    environment's ``np_random``, and the global generators if it uses them, are reseeded, so that
    noise differs between episodes with the same beginning; other generators continue and repeat
    their noise. The replayed steps are not part of the new episode, and are only counted in
    ``repeated_steps``. They shorten the episode, unless the environment has a method
    ``restart_clock()``, which is called after each of them.

    With each success of an episode that started from a beginning, others may start ``INTERVAL``
    steps earlier in the same beginning, so that it is learned backwards (Salimans and Chen 2018,
    "Learning Montezuma's Revenge from a Single Demonstration", arXiv 1812.03381, with a human
    demonstration). The more often episodes that start with a reset succeed, the fewer start midway;
    none in a solved task. Without a success signal, the score is used instead, and beginnings are
    always replayed in full.

    Args:
        env: the environment, not yet reset.
        spec: the tasks.
        fraction: fraction of the episodes of a task that never succeeds, from 0 to 1.
    """

    _latest: Moment
    """The last potential starting point in the current episode."""
    _best: Moment
    """The last one before the episode's largest reward."""
    _best_reward: float

    def __init__(self, env: gym.Env, spec: EnvSpec, fraction: float) -> None:
        super().__init__(env)
        self._spec = spec
        self._fraction = fraction
        self.repeated_steps = 0
        """Number of steps replayed so far."""
        self.forget()
        self._begin({}, [], 0)

    @property
    def is_midway(self) -> bool:
        """Whether the current episode started midway."""
        return self._num_repeated > 0

    def forget(self) -> None:
        """Discard all beginnings and statistics."""
        self._success = 0.0
        """Average over the episodes that started with a reset."""
        self._beginnings: list[Beginning] = []
        """Beginnings, best first."""
        self._restored: tuple[Beginning | None, int] | None = None
        """The beginning of the next reset after ``set_state``."""

    def reset(  # type: ignore[override]
        self, *, seed: int, options: dict | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Start an episode; the seed determines whether it starts midway."""
        beginning, num_steps = self._restored or self._sampled(np.random.default_rng([seed, 1]))
        self._restored = None
        if beginning is not None:
            start = self._start_from(beginning, num_steps, seed, options)
            if start is not None:
                return start
        observation, info = self.env.reset(seed=seed, options=options)
        self._begin({0: seed}, [], _checksum(observation))
        return observation, info

    def _sampled(self, generator: np.random.Generator) -> tuple[Beginning | None, int]:
        """Sample a beginning and the number of its steps to replay; None to start with a reset."""
        is_repeated = generator.random() < self._fraction * (1 - self._success)
        if not (is_repeated and self._beginnings):
            return None, 0
        beginning = self._beginnings[generator.integers(len(self._beginnings))]
        num_steps = len(beginning.action_SA)
        if beginning.num_successes:  # start earlier
            most_back = min(beginning.num_successes, num_steps // INTERVAL - 1)
            num_steps -= INTERVAL * int(generator.integers(most_back + 1))
        return beginning, num_steps

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; at the end of an episode, keep its beginning if it was good."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._actions.append(np.array(action))
        reward = float(read_reward(reward))
        self._return += reward
        self._has_succeeded |= self._spec.has_success and read_success(info)
        if not self._has_succeeded and reward > self._best_reward:
            self._best_reward = reward
            self._best = self._latest
        num_steps = len(self._actions)
        if num_steps % INTERVAL == 0:
            self._latest = Moment(num_steps, _checksum(observation))
        if terminated or truncated:
            self._end()
        return observation, reward, terminated, truncated, info

    def _begin(self, seeds: dict[int, int], actions: list[npt.NDArray], checksum: int) -> None:
        self._source: Beginning | None = None
        """The replayed beginning of an episode that started midway."""
        self._seeds = seeds
        self._actions = actions
        """Number of steps since the reset, including replayed ones."""
        self._num_repeated = len(actions)
        self._return = 0.0
        self._has_succeeded = False
        self._latest = Moment(len(actions), checksum)
        self._best = self._latest
        self._best_reward = -math.inf

    def _start_from(
        self, beginning: Beginning, num_steps: int, seed: int, options: dict | None
    ) -> tuple[npt.NDArray, dict[str, Any]] | None:
        """Start after a beginning; discard it and return None if it leads elsewhere."""
        seeds = {step: known for step, known in beginning.seeds.items() if step < num_steps}
        observation, info = self._repeat(seeds, beginning.action_SA[:num_steps], options)
        is_whole = num_steps == len(beginning.action_SA)
        if is_whole and _checksum(observation) != beginning.checksum:
            warnings.warn(
                f"the same seed and actions led {type(self.unwrapped).__name__} to a different"
                " observation: an episode starts with a reset instead of midway. If this happens"
                " often, make reset(seed=...) determine all randomness, or remove StartMidway from"
                " data.extras",
                stacklevel=2,
            )
            self._beginnings = [kept for kept in self._beginnings if kept is not beginning]
            return None
        self._reseed(seed)
        actions = list(beginning.action_SA[:num_steps])
        self._begin({**seeds, num_steps: seed}, actions, _checksum(observation))
        self._source = beginning
        return observation, info

    def _repeat(
        self, seeds: Mapping[int, int], action_SA: npt.NDArray, options: dict | None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Replay the first steps of an episode."""
        observation, info = self.env.reset(seed=seeds[0], options=options)
        self.repeated_steps += len(action_SA)
        restart_clock = self._clock()
        for step, action in enumerate(action_SA):
            if step and step in seeds:
                self._reseed(seeds[step])
            observation, _, _, _, info = self.env.step(action.copy())
            if restart_clock is not None:
                restart_clock()
        return observation, info

    def _reseed(self, seed: int) -> None:
        """Reseed the environment's own noise."""
        self.unwrapped.np_random = np.random.default_rng(seed)
        for layer in layers_of(self.env):
            if isinstance(layer, GlobalRandom):
                layer.reseed(seed)

    def _clock(self) -> Callable[[], None] | None:
        """Return a function that restarts the step counts of all layers; None if impossible."""
        if not self.env.has_wrapper_attr("restart_clock"):
            return None
        restart_own = self.env.get_wrapper_attr("restart_clock")
        limits = [layer for layer in layers_of(self.env) if isinstance(layer, TimeLimit)]

        def restart_clock() -> None:
            restart_own()
            for limit in limits:
                limit._elapsed_steps = 0  # type: ignore[assignment]

        return restart_clock

    def _end(self) -> None:
        """Update the average with the episode, and keep its beginning if it is good."""
        if not self._num_repeated:
            score = self._spec.score(self._return, self._has_succeeded)
            self._success += STEP_SIZE * (score - self._success)
        if self._source is not None:
            self._source.num_successes += self._has_succeeded
            if self._source.num_successes:
                return  # a longer beginning is not needed
        num_steps, checksum = self._best
        # without a clock to restart, replayed steps count towards the episode's horizon
        most = self._spec.horizon - 1
        if self._clock() is not None:
            most = MOST_REPEATED * self._spec.horizon
        # longer than the replayed beginning, which is already stored
        if self._num_repeated < num_steps <= most:
            action_SA = np.stack(self._actions[:num_steps])
            seeds = {step: seed for step, seed in self._seeds.items() if step < num_steps}
            self._beginnings.append(Beginning(self._best_reward, seeds, action_SA, checksum))
            self._beginnings.sort(key=lambda beginning: -beginning.reward)
            del self._beginnings[NUM_BEGINNINGS:]

    def get_state(self) -> dict[str, Any]:
        """Return the beginnings, and that of the current episode, as plain values."""
        kept = self._beginnings
        return {
            "success": self._success,
            "beginnings": [{**vars(one), "action_SA": one.action_SA.tolist()} for one in kept],
            "source": None if self._source is None else kept.index(self._source),
            "num_repeated": self._num_repeated,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state; the next reset starts like the saved episode."""
        self._success = state["success"]
        self._beginnings = [
            Beginning(**{**one, "action_SA": np.array(one["action_SA"], np.float32)})
            for one in state["beginnings"]
        ]
        source = None if state["source"] is None else self._beginnings[state["source"]]
        self._restored = source, state["num_repeated"]


def _checksum(observation: npt.NDArray) -> int:
    return zlib.crc32(np.ascontiguousarray(observation).tobytes())
