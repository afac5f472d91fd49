"""A benchmark of custom Gymnasium environments."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box
from gymnasium.wrappers import FlattenObservation, RescaleAction, TimeLimit, TransformAction

from mtrl_lightning.checks import at_least
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, check_spec
from mtrl_lightning.envs.benchmarks.images import with_image_observations
from mtrl_lightning.envs.benchmarks.padding import pad_to_spec, padded_spaces
from mtrl_lightning.envs.benchmarks.wrappers import time_limits
from mtrl_lightning.envs.names import callable_name, values_text
from mtrl_lightning.envs.step_values import read_reward
from mtrl_lightning.envs.vector.spaces import (
    can_be_flattened,
    with_one_hot_actions,
    wrong_actions,
    wrong_observations,
)
from mtrl_lightning.errors import ConfigurationError, installed_versions
from mtrl_lightning.spec import EnvSpec, Field, known_tasks

MakeEnv = Callable[..., gym.Env]

NO_RENDER_MODE = re.compile(r"argument 'render_mode'|takes no (keyword )?arguments")
"""Python's error message if a callable does not accept this argument."""
IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class GymnasiumTasks(Benchmark):
    """A Gymnasium environment for each task.

    Continuous actions are rescaled to [-1, 1]. Discrete actions (``Discrete``, ``MultiDiscrete``)
    are one-hot rows, of which the largest entry is taken. Observations that are dictionaries or
    tuples of boxes are flattened, or packed if they contain images. Vectors of different sizes are
    padded to the largest: observations with zeros, and actions with entries that have no effect.
    The split ``train`` seeds each environment once; in ``eval``, test episode ``k`` follows
    ``reset(seed=k)``.

    Args:
        tasks: environments by task name: a function or class that makes the environment without
            arguments, or its import path; or a registered ID such as ``Pendulum-v1``; or
            ``{"id": "Pendulum-v1", "kwargs": {"g": 5.0}}``. Alternatively a list of IDs, or a
            single ID, which are also the task names.
        horizon: steps after which an episode is truncated; null for the environments' own limit,
            set by a ``TimeLimit`` or the registration.
        has_success: whether ``info["success"]`` or ``info["is_success"]`` reports success.
    """

    def __init__(
        self,
        tasks: dict[str, str | dict[str, Any] | Callable[[], gym.Env]] | list[str] | str,
        horizon: int | None = None,
        has_success: bool = False,
    ) -> None:
        if not tasks:
            raise ConfigurationError("tasks is empty: give at least one environment")
        at_least(1, horizon=horizon)
        self.tasks = _named(tasks)
        _warn_of_late_binding(self.tasks)
        self.horizon = horizon
        self.has_success = has_success
        self._makers: dict[str, MakeEnv] = {}
        spaces: dict[str, tuple[Box, Box]] = {}
        choices: dict[str, tuple[int, ...]] = {}
        parts: dict[str, tuple[Field, ...]] = {}
        limits: list[int] = []
        for name, task in self.tasks.items():
            env, self._makers[name] = _made(name, task)
            limits.append(_horizon(name, env, horizon))
            prepared, choices[name], parts[name] = _with_boxes(name, env)
            observations = prepared.observation_space
            actions = prepared.action_space
            assert isinstance(observations, Box) and isinstance(actions, Box)
            spaces[name] = (observations, actions)
            env.close()
        common = padded_spaces(spaces)
        self._spec = check_spec(
            EnvSpec(
                task_names=tuple(self.tasks),
                observation_space=common.observation_space,
                action_space=common.action_space,
                horizon=max(limits),
                has_success=has_success,
                train_tasks=tuple(range(len(self.tasks))),
                protocol={
                    "benchmark": "gymnasium",
                    **installed_versions(["gymnasium"]),
                    "horizon": max(limits),
                    **{f"task {name}": _description(task) for name, task in self.tasks.items()},
                },
                observation_sizes=common.observation_sizes,
                action_sizes=common.action_sizes,
                action_choices=_common_choices(choices),
                observation_parts=_common_parts(parts),
                # the replay keeps an image once, not again as the previous row's successor
                frame_stack=int(
                    common.observation_space.dtype == np.uint8
                    and common.observation_space.shape[0] == 1
                ),
            )
        )

    @property
    def spec(self) -> EnvSpec:
        """The common spaces after padding, with actions in [-1, 1]."""
        return self._spec

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make the environment of one task."""
        return self._prepared(self._makers[self._spec.task_names[task]](), task, split, seed)

    def make_rendered_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make the environment with ``render_mode="rgb_array"``, if it accepts a render mode.

        Raises:
            TypeError: any other ``TypeError`` of the environment's constructor.
        """
        make = self._makers[self._spec.task_names[task]]
        try:
            env = make(render_mode="rgb_array")
        except TypeError as error:
            if NO_RENDER_MODE.search(str(error)) is None:
                raise
            env = make()  # its render() may work without the argument
        return self._prepared(env, task, split, seed)

    def _prepared(self, env: gym.Env, task: int, split: str, seed: int) -> gym.Env:
        name = self._spec.task_names[task]
        if self.horizon is not None:
            env = TimeLimit(env, self.horizon)
        env, _, _ = _with_boxes(name, env)
        env = pad_to_spec(env, self._spec)
        return _SeededEpisodes(env, split != "train", seed, self.has_success)


def _named(tasks: Any) -> dict[str, Any]:
    """Return the tasks by name."""
    if isinstance(tasks, Mapping):
        return dict(tasks)
    ids = [tasks] if isinstance(tasks, str) else tasks
    if not isinstance(ids, (list, tuple)) or not all(isinstance(name, str) for name in ids):
        raise ConfigurationError(
            f"tasks is {tasks!r}: give a name for each environment, such as"
            ' {"light": "Pendulum-v1", "own": make_env}, or a list of IDs'
        )
    return {name: name for name in known_tasks(ids, ids)}  # raises an error on duplicate IDs


def _warn_of_late_binding(tasks: Mapping[str, Any]) -> None:
    """Warn of functions defined in a loop, which all use the last value of its variable."""
    alike: dict[tuple, dict[int, str]] = {}
    for name, task in tasks.items():
        if inspect.isfunction(task):
            defaults = [*(task.__defaults__ or ()), *(task.__kwdefaults__ or {}).values()]
            bound = (task.__code__, *(task.__closure__ or ()), *defaults)
            alike.setdefault(tuple(map(id, bound)), {})[id(task)] = name
    for names in alike.values():
        if len(names) > 1:
            warnings.warn(
                f"the tasks {', '.join(names.values())} have the same environment, because their"
                " functions share all variables: bind the loop variable with"
                " functools.partial(Env, k) or lambda k=k: Env(k)",
                stacklevel=3,
            )


class _SeededEpisodes(gym.Wrapper):
    """Seed episodes as ``Benchmark`` specifies, and report success as ``info["success"]``."""

    def __init__(self, env: gym.Env, numbered: bool, seed: int, has_success: bool) -> None:
        super().__init__(env)
        self._numbered = numbered
        self._first_seed: int | None = seed
        self._next_episode = 0
        self._has_success = has_success

    @property
    def spec(self) -> None:  # type: ignore[override]
        """None, because this environment is not registered."""
        return None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if self._numbered:
            seed = self._next_episode if seed is None else seed
            self._next_episode = seed + 1
        elif seed is None:
            seed = self._first_seed
        self._first_seed = None
        return self.env.reset(seed=seed, options=options)

    def step(self, action: npt.NDArray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._has_success and "success" not in info:
            if "is_success" in info:
                info = {**info, "success": info["is_success"]}
            elif terminated or truncated:
                raise ConfigurationError(
                    "at the end of the episode, info has neither 'success' nor 'is_success':"
                    " report one of them, or set has_success to false"
                )
        return observation, read_reward(reward), terminated, truncated, info


class _Registered:
    """Makes a registered environment, even in a worker process that has not registered it."""

    def __init__(self, env: gym.Env, kwargs: dict[str, Any]) -> None:
        assert env.unwrapped.spec is not None, "set by gym.make"
        self._registered = gym.spec(env.unwrapped.spec.id)
        self._kwargs = kwargs

    def __call__(self, **kwargs: Any) -> gym.Env:
        return gym.make(self._registered, **{**self._kwargs, **kwargs})


def _made(name: str, task: Any) -> tuple[gym.Env, MakeEnv]:
    """Return a task's environment, and a function that makes more of them in worker processes."""
    try:
        if isinstance(task, str) and IMPORT_PATH.fullmatch(task) and task not in gym.registry:
            module, _, attribute = task.rpartition(".")
            task = getattr(importlib.import_module(module), attribute)
        if callable(task):
            env = task()
            make = task
        elif isinstance(task, str):
            env = gym.make(task)
            make = _Registered(env, {})
        elif isinstance(task, dict) and "id" in task and not {*task} - {"id", "kwargs"}:
            kwargs = task.get("kwargs") or {}
            env = gym.make(task["id"], **kwargs)
            make = _Registered(env, kwargs)
        else:
            raise ConfigurationError(
                f"task {name!r} is {task!r}: give a function that makes an environment, a"
                ' registered ID, or {"id": ..., "kwargs": {...}}'
            )
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"task {name!r}: {_description(task)} failed to make an environment"
            f" ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(env, gym.Env):
        raise ConfigurationError(
            f"task {name!r}: {_description(task)} makes a {type(env).__name__},"
            " which is not a gymnasium.Env"
        )
    return env, make


def _description(task: Any) -> str:
    """Describe a task's environment: ID and keyword arguments, or a function's qualified name."""
    if isinstance(task, str):
        return task
    if isinstance(task, dict):
        kwargs = task.get("kwargs") or {}
        return f"{task.get('id')} {values_text(kwargs) if kwargs else ''}".strip()
    return callable_name(task)


def _horizon(name: str, env: gym.Env, horizon: int | None) -> int:
    """Return the steps after which the environment's episodes are truncated."""
    limits = time_limits(env)
    if horizon is not None:
        limits.append(horizon)
    if not limits:
        raise ConfigurationError(
            f"task {name!r}: its episodes have no limit:"
            " set horizon, or wrap the environment in gymnasium.wrappers.TimeLimit"
        )
    return min(limits)


def _common_choices(choices: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the choices of each component of the tasks' actions; empty for continuous actions."""
    if len({*choices.values()}) > 1 and any(len(of_task) != 1 for of_task in choices.values()):
        kinds = ", ".join(f"{name} {list(of) or 'continuous'}" for name, of in choices.items())
        raise ConfigurationError(
            f"the tasks' actions are of different kinds ({kinds}): only Discrete actions may differ"
            " in their number. Wrap the environments (gymnasium.wrappers.TransformAction)"
        )
    return max(choices.values())


def _common_parts(parts: Mapping[str, tuple[Field, ...]]) -> tuple[Field, ...]:
    """Return the parts of the tasks' packed observations."""
    first, *others = parts.values()
    if any(of_task != first for of_task in others):
        shapes = {name: [field.shape for field in of_task] for name, of_task in parts.items()}
        kinds = ", ".join(f"{name} {of_task}" for name, of_task in shapes.items())
        raise ConfigurationError(
            f"the tasks' images and vectors differ ({kinds}): wrap the environments so that they"
            " are equal"
        )
    return first


def _with_boxes(name: str, env: gym.Env) -> tuple[gym.Env, tuple[int, ...], tuple[Field, ...]]:
    """Return the environment with boxes, and actions in [-1, 1].

    With it, a discrete action's choices, and the parts of an observation of images and vectors.
    """
    env, parts = with_image_observations(name, env)
    wrong = wrong_observations(env.observation_space)
    if wrong is not None:
        raise ConfigurationError(f"task {name!r}: {wrong}")
    if can_be_flattened(env.observation_space):
        env = FlattenObservation(env)
    env, choices = with_one_hot_actions(env)
    actions = env.action_space
    wrong = wrong_actions(actions)
    if wrong is not None:
        raise ConfigurationError(f"task {name!r}: {wrong}")
    assert isinstance(actions, Box)
    if not (np.isfinite(actions.low).all() and np.isfinite(actions.high).all()):
        raise ConfigurationError(
            f"task {name!r}: its action space {actions} is unbounded,"
            " so that actions cannot be rescaled to [-1, 1]:"
            " bound it, for example with gymnasium.wrappers.TransformAction"
        )
    number = actions.dtype.type
    constant, is_constant = actions.low, actions.low == actions.high
    if is_constant.any():
        low = np.where(is_constant, number(-1), actions.low)
        actions = Box(low, np.where(is_constant, number(1), actions.high), dtype=number)
        env = TransformAction(env, lambda action: np.where(is_constant, constant, action), actions)
    if not (np.all(actions.low == -1) and np.all(actions.high == 1)):
        env = RescaleAction(env, number(-1), number(1))
    return env, choices, parts
