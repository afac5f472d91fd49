"""Training episodes that begin where the agent's own best ones came near a success."""

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
"""Steps between two moments of an episode at which another one may begin."""
NUM_BEGINNINGS = 5
"""Beginnings that an environment keeps: those that led to the largest rewards."""
STEP_SIZE = 0.2
"""Weight of the newest episode in the average success."""
MOST_REPEATED = 4
"""Horizons that are repeated at most. An episode that began midway may itself give a beginning, so
that they grow longer than an episode."""


class Moment(NamedTuple):
    """A moment of the running episode."""

    num_steps: int
    """Since the reset, repeated ones included."""
    checksum: int
    """Of the observation."""


@dataclass(eq=False)
class Beginning:
    """The first steps of an episode, which can be repeated."""

    reward: float
    """The largest one that the episode reached afterwards, before it succeeded."""
    seeds: dict[int, int]
    """By number of steps: at 0 the seed of the reset, later ones of the environment's own noise."""
    action_SA: npt.NDArray
    """The actions of its first ``S`` steps."""
    checksum: int
    """Of the observation that they lead to."""
    num_successes: int = 0
    """Of the episodes that started from it."""


class MidwayStarts(gym.Wrapper):
    """Begin some episodes in the middle: the first steps of a good one of its own are repeated.

    What is found once by luck, such as an object between the fingers, is the start of many episodes
    (Ecoffet et al. 2021, "First return, then explore", arXiv 2004.12919, where a state is chosen by
    how seldom it was visited; here by the reward that it led to). Beginnings end at most
    ``INTERVAL`` steps before an episode's largest reward. They are repeated from the seed of the
    reset and the actions, so that every environment can have them whose episodes depend on nothing
    else; where one does not repeat, an episode begins with a reset instead. After the repeated
    steps the environment's ``np_random``, and the global generators if it draws from them, are
    seeded anew, so that noise differs between episodes with one beginning; a generator of another
    name continues, and repeats its noise. The repeated steps are no part of the new episode, and
    count only in ``repeated_steps``. It is shorter by them, unless the environment has a method
    ``restart_clock()``, which is called after each of them.

    With each success of an episode that started from a beginning, others may start ``INTERVAL``
    steps earlier on the same way, so that the way is learned backwards, and not its end alone
    (Salimans and Chen 2018, "Learning Montezuma's Revenge from a Single Demonstration", arXiv
    1812.03381, where the way is a person's). The more the episodes that begin with a reset succeed,
    the fewer begin midway, in a solved task none. Without a success signal, the score decides how
    many begin midway, and all of a beginning is repeated.

    Args:
        env: the environment, not yet reset.
        spec: the tasks.
        fraction: of the episodes of a task that never succeeds, from 0 to 1.
    """

    _latest: Moment
    """The last moment of the running episode at which another may begin."""
    _best: Moment
    """The last such moment before the episode's largest reward."""
    _best_reward: float

    def __init__(self, env: gym.Env, spec: EnvSpec, fraction: float) -> None:
        super().__init__(env)
        self._spec = spec
        self._fraction = fraction
        self.repeated_steps = 0
        """Steps that were repeated so far."""
        self.forget()
        self._begin({}, [], 0)

    @property
    def is_midway(self) -> bool:
        """Whether the running episode began midway."""
        return self._num_repeated > 0

    def forget(self) -> None:
        """Forget all episodes so far."""
        self._success = 0.0
        """Average over the episodes that began with a reset."""
        self._beginnings: list[Beginning] = []
        """The best one first."""
        self._restored: tuple[Beginning | None, int] | None = None
        """After ``set_state``: with what the next reset begins."""

    def reset(  # type: ignore[override]
        self, *, seed: int, options: dict | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Begin an episode; the seed decides whether in the middle of an earlier one."""
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
        """Return a beginning, and how many of its steps to repeat; None to begin with a reset."""
        is_repeated = generator.random() < self._fraction * (1 - self._success)
        if not (is_repeated and self._beginnings):
            return None, 0
        beginning = self._beginnings[generator.integers(len(self._beginnings))]
        num_steps = len(beginning.action_SA)
        if beginning.num_successes:  # from somewhere on the way
            most_back = min(beginning.num_successes, num_steps // INTERVAL - 1)
            num_steps -= INTERVAL * int(generator.integers(most_back + 1))
        return beginning, num_steps

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; at an episode's end, keep its beginning if it was good."""
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
        """Of an episode that began midway."""
        self._seeds = seeds
        self._actions = actions
        """Since the reset, repeated ones included."""
        self._num_repeated = len(actions)
        self._return = 0.0
        self._has_succeeded = False
        self._latest = Moment(len(actions), checksum)
        self._best = self._latest
        self._best_reward = -math.inf

    def _start_from(
        self, beginning: Beginning, num_steps: int, seed: int, options: dict | None
    ) -> tuple[npt.NDArray, dict[str, Any]] | None:
        """Begin where a beginning leads; return None, and forget it, if it leads elsewhere."""
        seeds = {step: known for step, known in beginning.seeds.items() if step < num_steps}
        observation, info = self._repeat(seeds, beginning.action_SA[:num_steps], options)
        is_whole = num_steps == len(beginning.action_SA)
        if is_whole and _checksum(observation) != beginning.checksum:
            warnings.warn(
                f"the same seed and actions led {type(self.unwrapped).__name__} to another"
                " observation: an episode begins with a reset instead of midway. If it is"
                " often so, let reset(seed=...) decide all that is random, or leave"
                " StartMidway out of data.extras",
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
        """Repeat the first steps of an episode."""
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
        """Begin another sequence of the environment's own noise."""
        self.unwrapped.np_random = np.random.default_rng(seed)
        for layer in layers_of(self.env):
            if isinstance(layer, GlobalRandom):
                layer.reseed(seed)

    def _clock(self) -> Callable[[], None] | None:
        """Return a function that restarts the step counts of all layers; None if there is none."""
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
        """Take the episode into the average, and its beginning among those that are kept."""
        if not self._num_repeated:
            score = self._spec.score(self._return, self._has_succeeded)
            self._success += STEP_SIZE * (score - self._success)
        if self._source is not None:
            self._source.num_successes += self._has_succeeded
            if self._source.num_successes:
                return  # a longer beginning is not needed
        num_steps, checksum = self._best
        # without a clock to restart, repeated steps count towards the episode's horizon
        most = self._spec.horizon - 1
        if self._clock() is not None:
            most = MOST_REPEATED * self._spec.horizon
        # longer than the repeated beginning, which is stored already
        if self._num_repeated < num_steps <= most:
            action_SA = np.stack(self._actions[:num_steps])
            seeds = {step: seed for step, seed in self._seeds.items() if step < num_steps}
            self._beginnings.append(Beginning(self._best_reward, seeds, action_SA, checksum))
            self._beginnings.sort(key=lambda beginning: -beginning.reward)
            del self._beginnings[NUM_BEGINNINGS:]

    def get_state(self) -> dict[str, Any]:
        """Return the beginnings, and that of the running episode, as plain values."""
        kept = self._beginnings
        return {
            "success": self._success,
            "beginnings": [{**vars(one), "action_SA": one.action_SA.tolist()} for one in kept],
            "source": None if self._source is None else kept.index(self._source),
            "num_repeated": self._num_repeated,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore them; the next reset begins as the running episode did."""
        self._success = state["success"]
        self._beginnings = [
            Beginning(**{**one, "action_SA": np.array(one["action_SA"], np.float32)})
            for one in state["beginnings"]
        ]
        source = None if state["source"] is None else self._beginnings[state["source"]]
        self._restored = source, state["num_repeated"]


def _checksum(observation: npt.NDArray) -> int:
    return zlib.crc32(np.ascontiguousarray(observation).tobytes())
