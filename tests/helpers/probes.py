"""Diagnostic environments: their values and best actions are known.

Five kinds, from what an algorithm has to learn first to what it learns last, with two tasks of
each, whose numbers differ: learning a row as that of another task would show.
"""

from functools import partial
from typing import NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.envs import GymnasiumTasks

DISCOUNT = 0.9
BEST = 0.6


class State(NamedTuple):
    """A state of an environment, with its value and the best action; NaN where any is as good."""

    kind: str
    size: float
    observation: float
    value: float
    action: float = np.nan


def states_of(kind, size):
    """Return the states in which an episode of a kind can begin, and then those that follow."""
    state = partial(State, kind, size)
    return {
        "constant": [state(0, size)],
        "observed": [state(-1, -size), state(1, size)],
        "delayed": [state(0, DISCOUNT * size), state(1, size)],
        "action": [state(0, 0, BEST * size)],
        "observed action": [state(-1, 0, -BEST * size), state(1, 0, BEST * size)],
    }[kind]


TASKS = {
    f"{kind} {size}": (kind, size)
    for kind in ("constant", "observed", "delayed", "action", "observed action")
    for size in (1.0, -0.5)
}
STATES = [(task, state) for task, names in enumerate(TASKS.values()) for state in states_of(*names)]


class Probe(gym.Env):
    """One step, or two if the reward is delayed.

    The reward is the state's value, and the negative squared distance to the best action.
    """

    observation_space = action_space = Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, kind, size):
        self.states = states_of(kind, size)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        is_delayed = self.states[0].kind == "delayed"
        index = 0 if is_delayed else self.np_random.integers(len(self.states))
        return self._at(self.states[index]), {}

    def step(self, action):
        state = self.state
        if state.kind == "delayed" and state.observation == 0:
            return self._at(self.states[1]), 0.0, False, False, {}
        distance = np.nan_to_num(float(action[0]) - state.action)
        return self._at(state), state.value - distance**2, True, False, {}

    def _at(self, state):
        self.state = state
        return np.array([state.observation], np.float32)


def probes():
    """Return a benchmark with the ten tasks."""
    return GymnasiumTasks(
        {name: partial(Probe, *names) for name, names in TASKS.items()}, horizon=2
    )
