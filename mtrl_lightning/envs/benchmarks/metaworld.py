"""MetaWorld (Yu et al. 2019; McLean et al. 2025, "Meta-World+"): tasks of a Sawyer arm."""

from __future__ import annotations

import copy
import warnings
from functools import cache, cached_property
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from mtrl_lightning.checks import at_least, one_of, within
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.envs.benchmarks.metaworld_goals import sampled_goals
from mtrl_lightning.envs.fast.guard import reason_for_upstream
from mtrl_lightning.envs.fast.metaworld_fast import CHECKED, fast_class, steps_like_upstream
from mtrl_lightning.errors import ConfigurationError, import_optional, installed_versions
from mtrl_lightning.spec import EnvSpec, known_tasks

MAX_GOALS = 50
"""Number of goals that MetaWorld samples for a task."""
CAMERA = "corner2"
"""The camera of MetaWorld's own images, which shows the table and the full arm."""
TEST_SPLIT = "eval_test"
"""Split with the test tasks of ML10 and ML45."""


class MetaWorld(Benchmark):
    """MetaWorld tasks with observable goals; episodes do not end on success.

    A task's goals are those of ``metaworld.MT1(task, seed=goal_seed)``, so that a task has the same
    goals in every list of tasks. Training samples one of them for each episode; the evaluation
    split visits them in order, so that test episode ``k`` has goal ``k mod num_goals``.

    ``ML10`` and ``ML45`` train on the training classes of MetaWorld's benchmarks of the same name.
    The split ``eval`` evaluates these, and ``eval_test`` the five test classes. Meta-learning is
    not supported: the agent does not adapt to a test class, and goals, which MetaWorld hides in
    these benchmarks, are observable.

    Args:
        tasks: ``MT10``, ``MT25``, ``MT50``, ``ML10``, ``ML45``, or task names such as ``reach-v3``;
            ``-v3`` is optional.
        reward_version: ``v2`` (dense, at most 10 per step; the current protocol) or ``v1`` (the
            early papers).
        horizon: steps in an episode; 500 in the current protocol, 150 in the early papers.
        evaluation_horizon: steps in a test episode; None for ``horizon``. Training with a shorter
            horizon is faster, and the success of test episodes stays comparable.
        num_goals: number of goals per task, 1 to 50.
        goal_seed: seed of the goals; the same for training and evaluation.
        fast: whether to use faster code, whose observations, rewards and goals are bit-identical to
            MetaWorld's. MetaWorld's own code is used, with a warning, if the installed version was
            not verified, or if a task's first steps differ on this machine (compared once per
            process, about 0.6 s). Fast environments cannot be pickled.
    """

    def __init__(
        self,
        tasks: str | list[str] = "MT10",
        reward_version: Literal["v1", "v2"] = "v2",
        horizon: int = 500,
        num_goals: int = MAX_GOALS,
        goal_seed: int = 0,
        fast: bool = True,
        evaluation_horizon: int | None = None,
    ) -> None:
        suite = import_optional("metaworld", "metaworld")
        within(1, MAX_GOALS, num_goals=num_goals)
        at_least(1, horizon=horizon, evaluation_horizon=evaluation_horizon)
        one_of(("v1", "v2"), reward_version=reward_version)
        at_least(0, goal_seed=goal_seed)
        trained, tested = _task_sets(suite, tasks)
        self.task_names = known_tasks([*trained, *tested], list(suite.ALL_V3_ENVIRONMENTS))
        self.num_trained = len(trained)
        if tested:
            self.splits = (*self.splits, TEST_SPLIT)
        self.reward_version = reward_version
        self.horizon = horizon
        self.evaluation_horizon = evaluation_horizon
        self.num_goals = num_goals
        self.goal_seed = goal_seed
        reason = reason_for_upstream(CHECKED, steps_like_upstream) if fast else ""
        if reason:
            message = f"using MetaWorld's own, slower code: {reason}"
            warnings.warn(message, stacklevel=2)
        self.fast = fast and not reason
        self._is_drawable = False

    @cached_property
    def spec(self) -> EnvSpec:
        """39-dimensional observations (two frames and the goal), 4 actions (hand and gripper)."""
        protocol: dict[str, str | int | float] = {
            "benchmark": "metaworld",
            **installed_versions(("metaworld", "mujoco")),
            "reward_version": self.reward_version,
            "horizon": self.horizon,
            "num_goals": self.num_goals,
            "goal_seed": self.goal_seed,
        }
        if self.evaluation_horizon is not None:
            protocol["evaluation_horizon"] = self.evaluation_horizon
        return EnvSpec(
            task_names=self.task_names,
            observation_space=Box(-np.inf, np.inf, (39,), np.float64),
            action_space=Box(-1.0, 1.0, (4,), np.float32),
            horizon=self.horizon,
            has_success=True,
            train_tasks=self.split_tasks(self.splits[0]),
            protocol=protocol,
        )

    def split_tasks(self, split: str) -> tuple[int, ...]:
        """Return the tasks of a split: test classes in ``eval_test``, otherwise trained ones."""
        tasks = tuple(range(len(self.task_names)))
        return tasks[self.num_trained :] if split == TEST_SPLIT else tasks[: self.num_trained]

    def horizon_of(self, split: str) -> int:
        """Return the episode length, which may differ in evaluation."""
        if split == self.splits[0] or self.evaluation_horizon is None:
            return self.horizon
        return self.evaluation_horizon

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make the environment of one task."""
        suite = import_optional("metaworld", "metaworld")
        name = self.task_names[task]
        goals = _goals(name, self.goal_seed, self.fast)[: self.num_goals]
        kind = suite.ALL_V3_ENVIRONMENTS[name]
        if self.fast:
            kind = fast_class(kind, is_drawable=True) if self._is_drawable else fast_class(kind)
        env = kind(reward_function_version=self.reward_version)
        env.max_path_length = self.horizon_of(split)
        env.seed(seed)
        env = suite.AutoTerminateOnSuccessWrapper(env)
        env.toggle_terminate_on_success(False)
        return _GoalSelection(env, goals, split != self.splits[0], seed)

    def make_rendered_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make an environment that can be rendered, whose model takes 20 MiB instead of 1 MiB."""
        drawable = copy.copy(self)
        drawable._is_drawable = True
        return drawable.make_env(task, split, seed)

    def camera(self, task: int) -> str | int | None:
        """Return the corner camera, which shows the table and the full arm."""
        return CAMERA


class _GoalSelection(gym.Wrapper):
    """Select the next episode's goal: at random in training, in order in evaluation.

    MetaWorld's own observation space is 0 for the goal until a task is set, and has the goal's
    bounds afterwards.
    """

    def __init__(self, env: gym.Env, goals: list[Any], numbered: bool, seed: int) -> None:
        super().__init__(env)
        self._goals = goals
        self._numbered = numbered
        self._next_episode = 0
        self._generator = np.random.default_rng(seed)
        simulated: Any = self.unwrapped
        simulated.set_task(goals[0])
        space = simulated.sawyer_observation_space
        self.observation_space = Box(space.low, space.high, dtype=np.float64)

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        if self._numbered:
            episode = self._next_episode if seed is None else seed
            self._next_episode = episode + 1
            goal = episode % len(self._goals)
            seed = episode
        else:
            if seed is not None:
                self._generator = np.random.default_rng(seed)
            goal = int(self._generator.integers(len(self._goals)))
        if seed is not None:
            # MetaWorld ignores the seed of reset; np_random is for wrappers
            self.unwrapped.np_random = np.random.default_rng(seed)
        self.unwrapped.set_task(self._goals[goal])  # type: ignore[attr-defined]
        return self.env.reset(options=options)

    def restart_clock(self) -> None:
        """Restart the step count of the episode."""
        self.unwrapped.curr_path_length = 0  # type: ignore[attr-defined]


def _task_sets(suite: Any, tasks: str | list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the trained and of the untrained tasks."""
    if not isinstance(tasks, str):
        return [_with_version(name) for name in tasks], []
    if tasks in ("MT10", "MT25", "MT50"):
        return list(getattr(suite.env_dict, f"{tasks}_V3")), []
    if tasks in ("ML10", "ML45"):
        classes = getattr(suite.env_dict, f"{tasks}_V3")
        return list(classes["train"]), list(classes["test"])
    if tasks.startswith(("MT", "ML")):
        raise ConfigurationError(
            f"unknown set of tasks {tasks!r}: use MT10, MT25 or MT50, or ML10 or ML45 with test"
            " classes (ML25 is not supported, because its sets overlap); for MT1, give the name of"
            " a task"
        )
    return [_with_version(tasks)], []


def _with_version(name: str) -> str:
    return name if name.endswith("-v3") else f"{name}-v3"


@cache
def _goals(name: str, seed: int, fast: bool) -> list[Any]:
    """Return MetaWorld's own 50 goals of a task, cached because sampling takes 100 resets."""
    if fast:
        return sampled_goals(name, seed)
    return import_optional("metaworld", "metaworld").MT1(name, seed=seed).train_tasks
