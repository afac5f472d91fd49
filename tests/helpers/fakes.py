"""Benchmarks, environments and policies that several tests share.

Worker processes import this: no torch.
"""

import functools

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import TimeLimit

from mtrl_lightning.envs import Benchmark
from mtrl_lightning.envs.vector.episodes import episode_seed
from mtrl_lightning.spec import EnvSpec, Field
from mtrl_lightning.transitions import StepResult

LENGTHS = (3, 1, 4, 2, 6, 5)


def scripted_length(task, episode):
    return LENGTHS[(task + episode) % len(LENGTHS)]


def scripted_return(task, episode):
    """Sums over different sets of episodes differ; all of it is the reward of the last step."""
    return 1000.0 * (task + 1) + 2.0**episode


def scripted_success(task, episode, step):
    """An even episode succeeds in its first step, one divisible by 3 in its last.

    Step 0 stands for any step.
    """
    first = episode % 2 == 0
    last = episode % 3 == 0
    if step == 0:
        return first or last
    return (first and step == 1) or (last and step == scripted_length(task, episode))


class Scripted(Benchmark):
    """Episodes that can be told by hand: the observation is ``[task, episode, step, last action]``.

    In both splits ``reset(seed=s)`` begins episode ``s`` and each further ``reset()`` the next one,
    also where ``VectorEnv`` seeds it.
    Odd tasks end by termination, even ones by truncation.
    """

    def __init__(self, num_tasks=3):
        self.num_tasks = num_tasks

    @property
    def spec(self):
        return EnvSpec(
            task_names=tuple(f"task-{i}" for i in range(self.num_tasks)),
            observation_space=Box(-np.inf, np.inf, (4,), np.float64),
            action_space=Box(-1.0, 1.0, (2,), np.float32),
            horizon=max(LENGTHS),
            has_success=True,
            train_tasks=tuple(range(self.num_tasks)),
            protocol={"benchmark": "scripted"},
        )

    def make_env(self, task, split, seed):
        return ScriptedEnv(self.spec, task, seed)


@functools.cache
def _numbers(seed):
    """The numbers of the first episodes after a seed, by their own seeds."""
    numbers = {episode_seed(seed, number): number for number in range(60)}
    small = {episode_seed(s, number): s + number for s in range(24) for number in range(1, 40)}
    return {**numbers, **small}


class ScriptedEnv(gym.Env):
    def __init__(self, spec, task, seed=0):
        self.first = seed
        self.observation_space, self.action_space = spec.observation_space, spec.action_space
        self.task = task
        self.episode = -1
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        self.episode = self.episode + 1 if seed is None else _numbers(self.first).get(seed, seed)
        self.steps = 0
        return np.array([self.task, self.episode, 0, 0], np.float64), {}

    def step(self, action):
        self.steps += 1
        done = self.steps == scripted_length(self.task, self.episode)
        assert self.steps <= scripted_length(self.task, self.episode), "stepped past the end"
        observation = np.array([self.task, self.episode, self.steps, action[0]], np.float64)
        reward = scripted_return(self.task, self.episode) if done else 0.0
        info = {"success": scripted_success(self.task, self.episode, self.steps)}
        return observation, reward, done and self.task % 2 == 1, done and self.task % 2 == 0, info

    def place(self, steps):
        return self.episode, steps


def arrays_of(result):
    """Every array of a step result, by name."""
    core = {name: getattr(result, name) for name in result._fields[:-2]}
    return core | dict(result.extra) | dict(result.info)


def step_result(reward, terminated, truncated, success, valid, midway=None):
    """Make a step result whose observations count up from the reward."""
    reward_E = np.array(reward, np.float64)
    next_observation_ED = np.repeat(reward_E[:, None], 4, axis=1)
    none = [False] * len(valid)
    midway = none if midway is None else midway
    columns = (terminated, truncated, success, midway, valid, none)
    flags = (np.array(flag, np.bool_) for flag in columns)
    return StepResult(next_observation_ED + 0.5, next_observation_ED, reward_E, *flags)


class Constant:
    """The same action always."""

    def __init__(self, action=(0.25, -0.5)):
        self.action = np.array(action, np.float32)

    def act(self, observation_ED, task_E, mode):
        return np.tile(self.action, (len(task_E), 1))


class Uniform:
    """Actions drawn uniformly, in every mode."""

    def __init__(self, action_size=2, seed=0):
        self._size, self._generator = action_size, np.random.default_rng(seed)

    def act(self, observation_ED, task_E, mode):
        return self._generator.uniform(-1, 1, (len(task_E), self._size)).astype(np.float32)


class Numbering:
    """Every action has a number of its own, so that a transition's action can be told."""

    def __init__(self):
        self.actions = 0

    def act(self, observation_ED, task_E, mode):
        numbers = self.actions + np.arange(1, len(task_E) + 1)
        self.actions += len(task_E)
        return np.stack([numbers / 1024, np.zeros(len(task_E))], axis=1).astype(np.float32)


class Recorder:
    """Acts as another policy and remembers what it was asked; with a spec, it knows its tasks."""

    def __init__(self, policy=None, spec=None):
        self.policy = Constant() if policy is None else policy
        self.spec = spec
        self.observations = []
        self.tasks = []
        self.modes = []
        self.noise = []

    def act(self, observation_ED, task_E, mode, noise_EA=None):
        self.observations.append(observation_ED.copy())
        self.tasks.append(task_E.copy())
        self.modes.append(mode)
        self.noise.append(noise_EA)
        return self.policy.act(observation_ED, task_E, mode)


class Seeker:
    """Walks a ``ToyReach`` point to the goal of its task: reaches every goal."""

    def __init__(self, num_tasks):
        angle_T = 2 * np.pi * np.arange(num_tasks) / num_tasks
        self._goal_TD = 0.7 * np.stack([np.cos(angle_T), np.sin(angle_T)], axis=1)

    def act(self, observation_ED, task_E, mode):
        return np.clip((self._goal_TD[task_E] - observation_ED) / 0.2, -1, 1).astype(np.float32)


class Point(gym.Env):
    """A point that an action moves along each axis; the nearer to 0, the better."""

    def __init__(self, num_axes):
        self.observation_space = Box(-9.0, 9.0, (num_axes,), np.float32)
        self.action_space = Box(-1.0, 1.0, (num_axes,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, self.observation_space.shape)
        return self.place.astype(np.float32), {}

    def step(self, action):
        self.place = np.clip(self.place + 0.2 * action, -9, 9)
        reward = 1 - float(np.abs(self.place).mean())
        return self.place.astype(np.float32), reward, False, False, {}


def point_on_a_line():
    return Point(1)


def point_in_space():
    return Point(3)


def half(number):
    return number / 2


class Drift(gym.ObservationWrapper):
    """A user's own: adds to the observations a number that grows in an episode."""

    def __init__(self, env, step=0.5):
        super().__init__(env)
        size = env.observation_space.shape[0]
        self.observation_space = Box(-np.inf, np.inf, (size,), np.float32)
        self._step = step
        self._drift = np.zeros(size)

    def reset(self, **kwargs):
        self._drift = np.zeros_like(self._drift)  # an evaluation depends on nothing before it
        return super().reset(**kwargs)

    def observation(self, observation):
        self._drift += self._step
        return (observation + self._drift).astype(np.float32)


class Line(gym.Env):
    """A point on a line, whose action is a force of at most 3."""

    action_space = Box(-3.0, 3.0, (1,), np.float32)

    observation_space = Box(-9.0, 9.0, (1,), np.float64)

    def __init__(self, success=None):
        self.success = success

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 1)
        return self.place, {}

    def step(self, action):
        self.place = self.place + action
        info = {} if self.success is None else {self.success: self.place[0] > 0}
        return self.place, float(action[0]), False, False, info


def limited(steps, **kwargs):
    return lambda: TimeLimit(Line(**kwargs), steps)


INFO_FIELDS = (Field("energy"), Field("place", (2,), "float64"), Field("count", (), "int64"))


class Informed(Scripted):
    """``Scripted`` with ``INFO_FIELDS``; step 2 of the second task has other values.

    Args:
        values: by name of what a step returns, or of a key in ``info``; ``...`` for none.
    """

    def __init__(self, **values):
        super().__init__(3)
        self.values = values

    @property
    def spec(self):
        return super().spec._replace(info_fields=INFO_FIELDS)

    def make_env(self, task, split, seed):
        return InformedEnv(self.spec, task, seed, self.values if task == 1 else {})


class InformedEnv(ScriptedEnv):
    def __init__(self, spec, task, seed, values):
        super().__init__(spec, task, seed)
        self.values = values

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        info |= {"energy": 0.25, "place": action * 2, "count": self.steps}
        core = {"observation": observation, "reward": reward, "terminated": terminated}
        returned = core | info | (self.values if self.steps == 2 else {})
        info = {name: returned[name] for name in info if returned[name] is not ...}
        return *(returned[name] for name in core), truncated, info
