"""The toy benchmark, broken or slow."""

import time

import gymnasium as gym
import numpy as np

from mtrl_lightning.envs import ToyReach


class FaultyReach(ToyReach):
    """Three toy tasks; the middle one breaks.

    Args:
        fault: ``nan`` for an observation, ``inf`` for a reward, ``raise`` for an exception.
    """

    def __init__(self, fault: str = "nan") -> None:
        super().__init__()
        self._fault = fault

    def make_env(self, task, split, seed):
        env = super().make_env(task, split, seed)
        return _Breaking(env, self._fault) if task == 1 else env


class _Breaking(gym.Wrapper):
    def __init__(self, env, fault):
        super().__init__(env)
        self._fault, self._steps = fault, 0

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        if self._steps == 47:  # the third episode's step 7
            if self._fault == "raise":
                raise RuntimeError("broken")
            observation = observation * np.nan if self._fault == "nan" else observation
            reward = np.inf if self._fault == "inf" else reward
        return observation, reward, terminated, truncated, info


class SlowReach(ToyReach):
    """Three toy tasks, a step of each of which takes 0.2 s."""

    def make_env(self, task, split, seed):
        return _Slow(super().make_env(task, split, seed))


class _Slow(gym.Wrapper):
    def step(self, action):
        time.sleep(0.2)
        return self.env.step(action)


class NoSuccess(ToyReach):
    """Three toy tasks without a success signal."""

    @property
    def spec(self):
        return super().spec._replace(has_success=False)
