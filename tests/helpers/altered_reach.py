"""The toy benchmark, broken or slow; worker processes import this: no torch."""

import os
import time

import gymnasium as gym
import numpy as np

from mtrl_lightning.envs import ToyReach


class OnceFaulty(ToyReach):
    """Three toy tasks, the environments of one of which break once.

    Args:
        fault: ``nan``, ``inf``, ``raise``, ``die`` (the process ends) or ``hang``.
        step: the step, counted since the environment was made, in which it breaks.
        task: which task; None for none.
        horizon: steps in an episode.
    """

    def __init__(self, fault="raise", step=7, task=1, horizon=5):
        super().__init__(3, horizon)
        self._fault, self._step, self._task = fault, step, task

    def make_env(self, task, split, seed):
        env = super().make_env(task, split, seed)
        return _OnceBreaking(env, self._fault, self._step) if task == self._task else env


class _OnceBreaking(gym.Wrapper):
    def __init__(self, env, fault, step):
        super().__init__(env)
        self._fault, self._step = fault, step
        self._taken = 0

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        self._taken += 1
        if self._taken == self._step:
            if self._fault == "raise":
                raise RuntimeError("broken")
            if self._fault == "die":
                os._exit(3)
            if self._fault == "hang":
                time.sleep(60)
            observation = observation * np.nan if self._fault == "nan" else observation
            reward = np.inf if self._fault == "inf" else reward
        return observation, reward, *rest


class FaultyReach(OnceFaulty):
    """Breaks in step 7 of the third episode, by default with a NaN."""

    def __init__(self, fault="nan"):
        super().__init__(fault, step=47, horizon=20)


class NoSuccess(ToyReach):
    """Three toy tasks without a success signal."""

    @property
    def spec(self):
        return super().spec._replace(has_success=False)


class Halves(ToyReach):
    """Each of the two splits has a task of its own, and no environment of the other's."""

    def split_tasks(self, split):
        return (0,) if split == "train" else (1,)

    def make_env(self, task, split, seed):
        assert task in self.split_tasks(split)
        return super().make_env(task, split, seed)

    def camera(self, task):
        return f"camera {task}"


class Large(ToyReach):
    """Three toy tasks with an attribute and arguments too large for one message in a pipe."""

    def make_env(self, task, split, seed):
        env = super().make_env(task, split, seed)
        env.ballast = np.arange(600_000.0)
        env.take = len
        return env


class Reporting(ToyReach):
    """Three toy tasks that report numbers in ``info``, by which transitions are recognized.

    ``place`` is the point's first coordinate after the step, ``steps`` how many the episode has,
    ``score`` comes with the episode's last step only, ``odd`` in odd tasks only.
    """

    def make_env(self, task, split, seed):
        return _Reporting(super().make_env(task, split, seed), task)


class _Reporting(gym.Wrapper):
    def __init__(self, env, task):
        super().__init__(env)
        self._task, self._steps = task, 0

    def reset(self, **kwargs):
        self._steps = 0
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        info |= {"place": observation[0], "steps": self._steps, "both": observation}
        if truncated:
            info["score"] = 10.0 * self._task
        if self._task % 2:
            info["odd"] = True
        return observation, reward, terminated, truncated, info
