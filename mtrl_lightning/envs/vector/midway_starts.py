"""Training episodes that begin where the agent's own best ones came near a success."""

from __future__ import annotations

import contextlib
import math
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.wrappers import TimeLimit

from mtrl_lightning.envs.state.state import EnvState, layers_of
from mtrl_lightning.envs.step_values import read_reward, read_success
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec

INTERVAL = 10
"""Steps between two moments of an episode at which another one may begin."""
NUM_BEGINNINGS = 5
"""Beginnings that an environment keeps: those that led to the largest rewards."""
STEP_SIZE = 0.2
"""Weight of the newest episode in the average success."""
SEEDS = 2**31
"""Seeds are sampled below this number."""
MOST_REPEATED = 4
"""Horizons that are repeated at most. An episode that began midway may itself give a beginning, so
that they grow longer than an episode."""


class Moment(NamedTuple):
    """A moment of the running episode."""

    num_steps: int
    """Since the reset, repeated ones included."""
    checksum: int
    """Of the observation."""


class Snapshot(NamedTuple):
    """The environment after a beginning's steps."""

    state: list[Any]
    observation: npt.NDArray
    info: dict[str, Any]


@dataclass(eq=False)
class Beginning:
    """The first steps of an episode, which can be repeated."""

    reward: float
    """The largest one that the episode reached afterwards, before it succeeded."""
    seed: int
    """With which the episode was reset."""
    action_SA: npt.NDArray
    """The actions of its first ``S`` steps."""
    checksum: int
    """Of the observation that they lead to."""
    num_successes: int = 0
    """Of the episodes that started from it."""
    snapshot: Snapshot | None = None
    """None until the steps have been repeated once."""


class MidwayStarts(gym.Wrapper):
    """Begin some episodes in the middle: the first steps of a good one of its own are repeated.

    What is found once by luck, such as an object between the fingers, is the start of many episodes
    (Ecoffet et al. 2021, "First return, then explore", arXiv 2004.12919, where a state is chosen by
    how seldom it was visited; here by the reward that it led to). Beginnings end at most
    ``INTERVAL`` steps before an episode's largest reward. They are repeated from the seed of the
    reset and the actions, so that every environment can have them whose episodes depend on nothing
    else; where one does not repeat, an episode begins with a reset instead. The repeated steps are
    no part of the new episode, and count only in ``repeated_steps``. It is shorter by them, unless
    the environment has a method ``restart_clock()``, which is called after each of them. Where the
    environment's state can be taken (``EnvState``), all of a beginning is repeated once, and from
    then on the state is restored that it led to.

    With each success of an episode that started from a beginning, others may start ``INTERVAL``
    steps earlier on the same way, so that the way is learned backwards, and not its end alone
    (Salimans and Chen 2018, "Learning Montezuma's Revenge from a Single Demonstration", arXiv
    1812.03381, where the way is a person's). The more the episodes that begin with a reset succeed,
    the fewer begin midway, in a solved task none. Without a success signal, the score decides how
    many begin midway, and all of a beginning is repeated.

    Args:
        env: the environment, not yet reset.
        spec: the tasks.
        seed: of all random numbers.
        fraction: of the episodes of a task that never succeeds, from 0 to 1.
    """

    _latest: Moment
    """The last moment of the running episode at which another may begin."""
    _best: Moment
    """The last such moment before the episode's largest reward."""
    _best_reward: float

    def __init__(self, env: gym.Env, spec: EnvSpec, seed: int, fraction: float) -> None:
        super().__init__(env)
        self._spec = spec
        self._fraction = fraction
        self._env_state = EnvState(env)
        self._generator = np.random.default_rng([seed, 1])
        self._success = 0.0
        """Average over the episodes that began with a reset."""
        self._beginnings: list[Beginning] = []
        """The best one first."""
        self.repeated_steps = 0
        """Steps that were repeated so far."""
        self._begin(0, [], 0)

    @property
    def is_midway(self) -> bool:
        """Whether the running episode began midway."""
        return self._num_repeated > 0

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Begin an episode; without a seed, chance decides whether in the middle of an earlier one.

        A seed determines all that follows, so earlier episodes are forgotten.
        """
        if seed is not None:
            self._generator = np.random.default_rng([seed, 1])
            self._success = 0.0
            self._beginnings = []
        is_repeated = self._generator.random() < self._fraction * (1 - self._success)
        sampled = int(self._generator.integers(SEEDS))
        if is_repeated and self._beginnings:
            beginning = self._beginnings[sampled % len(self._beginnings)]
            num_steps = len(beginning.action_SA)
            if beginning.num_successes:  # from somewhere on the way
                most_back = min(beginning.num_successes, num_steps // INTERVAL - 1)
                num_steps -= INTERVAL * int(self._generator.integers(most_back + 1))
            start = self._start_from(beginning, num_steps, options)
            if start is not None:
                return start
        episode_seed = sampled if seed is None else seed
        observation, info = self.env.reset(seed=episode_seed, options=options)
        self._begin(episode_seed, [], _checksum(observation))
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; at an episode's end, keep its beginning if it was good."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._actions.append(np.array(action))
        reward = read_reward(reward)
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

    def _begin(self, seed: int, actions: list[npt.NDArray], checksum: int) -> None:
        self._source: Beginning | None = None
        """Of an episode that began midway."""
        self._seed = seed
        self._actions = actions
        """Since the reset, repeated ones included."""
        self._num_repeated = len(actions)
        self._return = 0.0
        self._has_succeeded = False
        self._latest = Moment(len(actions), checksum)
        self._best = self._latest
        self._best_reward = -math.inf

    def _start_from(
        self, beginning: Beginning, num_steps: int, options: dict | None
    ) -> tuple[npt.NDArray, dict[str, Any]] | None:
        """Begin where a beginning leads; return None, and forget it, if it leads elsewhere."""
        is_whole = num_steps == len(beginning.action_SA)
        snapshot = beginning.snapshot if is_whole and options is None else None
        if snapshot is not None and self._has_restored(snapshot):
            observation, info = snapshot.observation.copy(), snapshot.info.copy()
        else:
            observation, info = self._repeat(
                beginning.seed, beginning.action_SA[:num_steps], options
            )
            if is_whole and _checksum(observation) != beginning.checksum:
                warnings.warn(
                    f"the same seed and actions led {type(self.unwrapped).__name__} to another"
                    " observation: an episode begins with a reset in place of midway. If it is"
                    " often so, let reset(seed=...) decide all that is random, or set"
                    " StartMidway out of data.extras",
                    stacklevel=2,
                )
                self._beginnings = [kept for kept in self._beginnings if kept is not beginning]
                return None
            if is_whole and options is None:
                # an environment whose state cannot be taken repeats the steps each time
                with contextlib.suppress(ConfigurationError):
                    state = self._env_state.get()
                    beginning.snapshot = Snapshot(state, observation.copy(), info.copy())
        actions = list(beginning.action_SA[:num_steps])
        self._begin(beginning.seed, actions, _checksum(observation))
        self._source = beginning
        return observation, info

    def _has_restored(self, snapshot: Snapshot) -> bool:
        """Restore the environment; False if it has changed so that it cannot take the state."""
        try:
            self._env_state.set(snapshot.state)
        except ConfigurationError:
            return False
        return True

    def _repeat(
        self, seed: int, action_SA: npt.NDArray, options: dict | None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Repeat the first steps of an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        self.repeated_steps += len(action_SA)
        restart_clock = self._clock()
        for action in action_SA:
            observation, _, _, _, info = self.env.step(action.copy())
            if restart_clock is not None:
                restart_clock()
        return observation, info

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
            self._beginnings.append(Beginning(self._best_reward, self._seed, action_SA, checksum))
            self._beginnings.sort(key=lambda beginning: -beginning.reward)
            del self._beginnings[NUM_BEGINNINGS:]

    def get_state(self) -> dict[str, Any]:
        """Return the beginnings, the running episode and the generator's state."""
        return {
            "generator": self._generator.bit_generator.state,
            "success": self._success,
            "beginnings": [
                [kept.reward, kept.seed, kept.action_SA, kept.checksum, kept.num_successes]
                for kept in self._beginnings
            ],
            "source": next(
                (i for i, kept in enumerate(self._beginnings) if kept is self._source), None
            ),
            "seed": self._seed,
            "actions": list(self._actions),
            "num_repeated": self._num_repeated,
            "return": self._return,
            "has_succeeded": self._has_succeeded,
            "latest": list(self._latest),
            "best": list(self._best),
            "best_reward": self._best_reward,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self._generator.bit_generator.state = state["generator"]
        self._success = state["success"]
        self._beginnings = [Beginning(*beginning) for beginning in state["beginnings"]]
        self._begin(state["seed"], list(state["actions"]), 0)
        if state["source"] is not None:
            self._source = self._beginnings[state["source"]]
        self._num_repeated = state["num_repeated"]
        self._return = state["return"]
        self._has_succeeded = state["has_succeeded"]
        self._latest = Moment(*state["latest"])
        self._best = Moment(*state["best"])
        self._best_reward = state["best_reward"]


def _checksum(observation: npt.NDArray) -> int:
    return zlib.crc32(np.ascontiguousarray(observation).tobytes())
