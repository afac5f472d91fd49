"""The DeepMind Control Suite (Tassa et al. 2018): tasks of many bodies, simulated by MuJoCo."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.checks import above, within
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.envs.benchmarks.dm_control_domains import import_suite, load
from mtrl_lightning.envs.benchmarks.dm_control_env import FastStepper, OwnStepper, SuiteEnv
from mtrl_lightning.envs.benchmarks.padding import pad_to_spec, padded_spaces
from mtrl_lightning.envs.fast.dm_control_fast import CHECKED
from mtrl_lightning.envs.fast.guard import reason_for_upstream
from mtrl_lightning.errors import ConfigurationError, installed_versions
from mtrl_lightning.spec import EnvSpec, known_tasks

MAX_HORIZON = 1000
"""Number of control steps in an episode of every task except lqr's."""
MAX_REWARD = 1.0
"""Largest reward of a control step, in every task except lqr's."""
DMC19 = (
    "acrobot-swingup",
    "ball_in_cup-catch",
    "cartpole-balance",
    "cartpole-balance_sparse",
    "cartpole-swingup",
    "cartpole-swingup_sparse",
    "cheetah-run",
    "finger-spin",
    "finger-turn_easy",
    "finger-turn_hard",
    "fish-swim",
    "hopper-stand",
    "hopper-hop",
    "pendulum-swingup",
    "reacher-easy",
    "reacher-hard",
    "walker-stand",
    "walker-walk",
    "walker-run",
)
"""dm_control's tasks in TD-MPC2's multi-task experiments (Hansen et al. 2024)."""
DMC21 = (*DMC19, "quadruped-walk", "quadruped-run")
"""dm_control's tasks in MMBench (Hansen et al. 2025)."""
LQR = "lqr"
CAMERAS = {"quadruped": 2}
"""The camera of videos by domain, if not camera 0."""
CHECK_TASK = "walker-walk"
"""The task whose steps are compared with dm_control's own on first use in a process."""
CHECK_STEPS = 20


@cache
def steps_like_upstream() -> bool:
    """Return whether the steps of a task equal dm_control's own, bit for bit, in this process."""
    try:
        ours = _some_steps(fast=True)
    except Exception:  # anything may happen with other versions
        return False
    return ours == _some_steps(fast=False)


def _some_steps(fast: bool) -> list[tuple[bytes, float]]:
    """Return observations and rewards of the first steps with given actions."""
    environment = load(CHECK_TASK, fast)
    env = SuiteEnv(
        environment,
        FastStepper(environment) if fast else OwnStepper(environment),
        action_repeat=1,
        horizon=CHECK_STEPS,
        reward_scale=1.0,
        wrap_angles=False,
        is_drawable=False,
        is_for_evaluation=True,
        seed=0,
    )
    env.reset(seed=0)
    shape = CHECK_STEPS, *environment.action_spec().shape
    actions = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    steps = [env.step(action) for action in actions]
    return [(observation.tobytes(), float(reward)) for observation, reward, *_ in steps]


class SuiteTasks(Benchmark):
    """Tasks of the suite's domains; a subclass selects and loads them.

    Tasks of different bodies are padded to the largest sizes among them. Rewards of a control step
    lie between 0 and 1 and episodes do not end early, so that ``eval/score`` is the return divided
    by the largest one.

    Args:
        task_names: names of all tasks.
        train_tasks: indices of the trained tasks.
        action_repeat: control steps per environment step; their rewards are added.
        horizon: control steps in an episode, at most 1000.
        reward_scale: factor of every reward, above 0; the score does not depend on it.
        fast: whether to step with faster code, if the installed version was verified.
        wrap_angles: whether to wrap angles that count full turns.
    """

    def __init__(
        self,
        task_names: Sequence[str],
        train_tasks: Sequence[int],
        action_repeat: int,
        horizon: int,
        reward_scale: float,
        fast: bool,
        wrap_angles: bool = False,
    ) -> None:
        self.task_names = tuple(task_names)
        import_suite()  # its error names the package to install; versions are looked up below
        within(1, MAX_HORIZON, horizon=horizon, hint=" of control steps")
        within(1, horizon, action_repeat=action_repeat, hint=", the horizon in control steps")
        above(0, finite=True, reward_scale=reward_scale)
        if horizon % action_repeat:
            warnings.warn(
                f"action_repeat {action_repeat} does not divide the horizon of {horizon} control"
                f" steps: the last action of an episode is repeated only {horizon % action_repeat}"
                " times",
                stacklevel=3,
            )
        reason = reason_for_upstream(CHECKED, steps_like_upstream) if fast else ""
        if reason:
            message = f"using dm_control's own, slower code: {reason}"
            warnings.warn(message, stacklevel=3)
        self.action_repeat = action_repeat
        self.horizon = horizon
        self.reward_scale = reward_scale
        self.fast = fast and not reason
        self.wrap_angles = wrap_angles
        self._train_tasks = tuple(train_tasks)
        self._is_drawable = False
        self._spec = self._make_spec()

    def load(self, name: str) -> Any:
        """Return dm_control's ``Environment`` of a task."""
        raise NotImplementedError

    @property
    def protocol(self) -> dict[str, str | int | float]:
        """Additional entries of the protocol."""
        return {}

    @property
    def spec(self) -> EnvSpec:
        """The sizes of the largest task, and each task's own."""
        return self._spec

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make the environment of one task."""
        env = self._make(self.task_names[task], split != "train", seed)
        return pad_to_spec(env, self._spec)

    def make_rendered_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make an environment that can be rendered, whose model has 11 MiB of textures."""
        drawable = copy.copy(self)
        drawable._is_drawable = True
        return drawable.make_env(task, split, seed)

    def camera(self, task: int) -> str | int | None:
        """Return the index of the camera for videos."""
        return CAMERAS.get(self.task_names[task].partition("-")[0], 0)

    def _make(self, name: str, is_for_evaluation: bool, seed: int) -> gym.Env:
        environment = self.load(name)
        return SuiteEnv(
            environment,
            FastStepper(environment) if self.fast else OwnStepper(environment),
            action_repeat=self.action_repeat,
            horizon=self.horizon,
            reward_scale=self.reward_scale,
            wrap_angles=self.wrap_angles,
            is_drawable=self._is_drawable,
            is_for_evaluation=is_for_evaluation,
            seed=seed,
        )

    def _make_spec(self) -> EnvSpec:
        spaces: dict[str, tuple[Box, Box]] = {}
        for name in self.task_names:
            env = self._make(name, False, 0)
            observations = env.observation_space
            actions = env.action_space
            assert isinstance(observations, Box) and isinstance(actions, Box)
            spaces[name] = (observations, actions)
        shared = padded_spaces(spaces)
        decisions = math.ceil(self.horizon / self.action_repeat)
        return EnvSpec(
            task_names=self.task_names,
            observation_space=shared.observation_space,
            action_space=shared.action_space,
            horizon=decisions,
            has_success=False,
            train_tasks=self._train_tasks,
            protocol={
                "benchmark": "dm_control",
                **self.protocol,
                **installed_versions(("dm_control", "mujoco")),
                "action_repeat": self.action_repeat,
                "horizon": self.horizon,
                "frames": f"{self.horizon} control steps in {decisions} env steps",
                "reward_scale": self.reward_scale,
                **({"angles": "without full turns"} if self.wrap_angles else {}),
            },
            observation_sizes=shared.observation_sizes,
            action_sizes=shared.action_sizes,
            max_return=self.horizon * MAX_REWARD * self.reward_scale,
        )


class DMControl(SuiteTasks):
    """Tasks of the DeepMind Control Suite, from states.

    Tasks of different bodies are padded to the largest sizes among them. Rewards of a control step
    lie between 0 and 1 and episodes do not end early, so that ``eval/score`` is the return divided
    by the largest one. Training samples initial states; test episode ``k`` is the first one of
    dm_control's task with ``random=k``.

    Args:
        tasks: ``DMC19``, ``DMC21``, ``BENCHMARKING`` (dm_control's 28), or names such as
            ``walker-walk``: a domain and one of its tasks.
        action_repeat: control steps per environment step; their rewards are summed. If it does not
            divide the horizon, the last environment step of an episode has fewer.
        horizon: control steps in an episode, at most 1000 (dm_control's default).
        reward_scale: factor of every reward, above 0; the score does not depend on it.
        fast: whether to step with faster code, whose observations and rewards are bit-identical to
            dm_control's. If the installed version was not verified, dm_control's own code is used,
            with a warning.
        wrap_angles: whether to wrap angles in observations that count full turns to [-pi, pi]:
            reacher's shoulder, the pitch of cheetah and hopper. An arm that turns for a full
            episode reaches 100 rad, so that ``Standardize`` divides by a standard deviation of 10
            to 20 rad. False for dm_control's observations.
    """

    def __init__(
        self,
        tasks: str | list[str] = "DMC21",
        action_repeat: int = 2,
        horizon: int = MAX_HORIZON,
        reward_scale: float = 1.0,
        fast: bool = True,
        wrap_angles: bool = False,
    ) -> None:
        names = _names(tasks)
        super().__init__(
            names, range(len(names)), action_repeat, horizon, reward_scale, fast, wrap_angles
        )

    def load(self, name: str) -> Any:
        """Return dm_control's ``Environment`` of a task."""
        return load(name, self.fast)


def _names(tasks: str | list[str]) -> tuple[str, ...]:
    """Return the names of a set of tasks, or the given names if all are known."""
    suite = import_suite()
    known = ["-".join(pair) for pair in suite.ALL_TASKS]
    sets = {
        "DMC19": DMC19,
        "DMC21": DMC21,
        "BENCHMARKING": tuple("-".join(pair) for pair in suite.BENCHMARKING),
    }
    if isinstance(tasks, str):
        if tasks in sets:
            return sets[tasks]
        known = [*sets, *known]
        tasks = [tasks]
    names = known_tasks(tasks, known)
    for name in names:
        if name.startswith(f"{LQR}-"):
            raise ConfigurationError(
                f"task {name!r} has unbounded actions and rewards, and episodes without a limit:"
                " remove it"
            )
    return names
