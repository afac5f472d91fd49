"""A benchmark whose environments are wrapped in Gymnasium wrappers or custom ones."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import wrappers as gymnasium_wrappers
from gymnasium.spaces import Box

from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, BenchmarkWrapper, check_spec
from mtrl_lightning.envs.benchmarks.padding import pad_to_spec, padded_spaces, without_padding
from mtrl_lightning.envs.layers import layers_of
from mtrl_lightning.envs.names import callable_name, values_text
from mtrl_lightning.envs.vector.spaces import (
    can_be_flattened,
    wrong_actions,
    wrong_observations,
)
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec

MakeWrapper: TypeAlias = Callable[[gym.Env], gym.Env]
Wrapper: TypeAlias = "str | Mapping[str, Any] | MakeWrapper"
"""A class or function called with an environment, its import path, or a mapping with ``class_path``
and ``init_args``."""

GYMNASIUM = "gymnasium.wrappers"
REFUSED: dict[type[gym.Wrapper], str] = {
    gymnasium_wrappers.NormalizeObservation: (
        "each copy in each environment would have different statistics. Remove it, and set"
        " model.init_args.encoder to mtrl_lightning.networks.Standardize, which shares its"
        " statistics"
    ),
    gymnasium_wrappers.NormalizeReward: (
        "each copy in each environment would have different statistics. Remove it, and set"
        " model.init_args.reward_scale to"
        " {class_path: mtrl_lightning.algorithms.NormalizeReward}, which has one set of statistics"
        " per task; PPO already normalizes returns (return_scale)"
    ),
    gymnasium_wrappers.Autoreset: (
        "environments are already reset at the end of episodes, which it would hide from the"
        " learner. Remove it"
    ),
}
"""Unsupported wrappers, with the reason and a remedy."""


class WithWrappers(BenchmarkWrapper):
    """A benchmark whose environments are wrapped, both for training and for evaluation.

    Wrappers get a task's own environment, without padding. Afterwards, dictionaries or tuples of
    boxes are flattened, and tasks of different sizes are padded. The spaces of the spec are read
    from one wrapped environment of each task. An environment without a ``TimeLimit`` gets one with
    the benchmark's horizon before the first wrapper, because wrappers such as
    ``TimeAwareObservation`` read it. If a ``RewardWrapper`` or a shorter horizon changes the
    largest return, there is no score.

    Args:
        benchmark: the tasks.
        wrappers: the wrappers, innermost first: each a class or function, its import path, or
            ``{"class_path": ..., "init_args": {...}}``.
    """

    def __init__(self, benchmark: Benchmark, wrappers: Sequence[Wrapper]) -> None:
        super().__init__(benchmark)
        self.wrappers = [_resolved(wrapper) for wrapper in wrappers]
        spec = benchmark.spec
        spaces: dict[str, tuple[Box, Box]] = {}
        own_spaces: dict[str, tuple[Any, Any]] = {}
        horizons: list[int] = []
        changes_rewards = False
        for task, name in enumerate(spec.task_names):
            of_task = (split for split in self.splits if task in benchmark.split_tasks(split))
            split = next(of_task, self.splits[0])
            own = self._own_env(benchmark.make_env(task, split, seed=0), split)
            own_spaces[name] = (own.observation_space, own.action_space)
            env = self._wrapped(own)
            try:
                spaces[name] = _checked_spaces(name, env)
                horizons.append(min([spec.horizon, *time_limits(env)]))
                own_layers = [id(layer) for layer in layers_of(own)]
                changes_rewards |= any(
                    isinstance(layer, gym.RewardWrapper)
                    for layer in layers_of(env)
                    if id(layer) not in own_layers
                )
            finally:
                env.close()
        # spaces that no wrapper changes remain those of the benchmark, which may be wider;
        # frame deduplication needs stacks that no wrapper has changed
        self._changed: dict[str, Any] = {"frame_stack": 0}
        parts = ("observation_parts", "action_choices")
        for index, kind in enumerate(("observation", "action")):
            if any(spaces[name][index] != own_spaces[name][index] for name in spaces):
                padded = padded_spaces(spaces)._asdict()
                names = (f"{kind}_space", f"{kind}_sizes")
                self._changed |= {name: padded[name] for name in names} | {parts[index]: ()}
        self._horizon = max(horizons)
        if changes_rewards or self._horizon != spec.horizon:
            self._changed["max_return"] = None
        check_spec(self.spec)

    @property
    def pipeline(self) -> str:
        """The wrappers and their arguments as text, innermost first."""
        return " > ".join(_name(wrapper) for wrapper in self.wrappers)

    @cached_property
    def spec(self) -> EnvSpec:
        """The benchmark's spec, with the spaces and the horizon of its wrapped environments."""
        spec = self.benchmark.spec
        pipelines = [str(spec.protocol.get("wrappers", "")), self.pipeline]
        return spec._replace(
            **self._changed,
            horizon=self._horizon,
            protocol={**spec.protocol, "wrappers": " > ".join(filter(None, pipelines))},
        )

    def horizon_of(self, split: str) -> int:
        """Return the benchmark's horizon of a split, or that of a wrapper if it is shorter."""
        horizon = self.benchmark.horizon_of(split)
        is_shortened = self._horizon < self.benchmark.spec.horizon
        return min(horizon, self._horizon) if is_shortened else horizon

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make one of the benchmark's environments, and wrap it."""
        env = self.benchmark.make_env(task, split, seed)
        return self._wrapped_and_padded(env, split, seed)

    def make_rendered_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make one of the benchmark's environments for a video, and wrap it."""
        env = self.benchmark.make_rendered_env(task, split, seed)
        return self._wrapped_and_padded(env, split, seed)

    def _wrapped_and_padded(self, env: gym.Env, split: str, seed: int) -> gym.Env:
        env = self._wrapped(self._own_env(env, split))
        for layer in layers_of(env):
            # wrappers that derive a space from another do not seed its generator
            layer.observation_space.seed(seed)
            layer.action_space.seed(seed)
        return pad_to_spec(env, self.spec)

    def _own_env(self, env: gym.Env, split: str) -> gym.Env:
        """Return the environment to wrap: with a ``TimeLimit`` and without padding."""
        env = without_padding(env)
        if time_limits(env):
            return env
        return gymnasium_wrappers.TimeLimit(env, self.benchmark.horizon_of(split))

    def _wrapped(self, env: gym.Env) -> gym.Env:
        for make in self.wrappers:
            env = _wrapped_in(make, env)
        if can_be_flattened(env.observation_space):
            env = gymnasium_wrappers.FlattenObservation(env)
        return env


def with_layers(
    benchmark: Benchmark,
    wrappers: Sequence[Wrapper] | None,
    pixels: Callable[[Benchmark], Benchmark] | None,
) -> Benchmark:
    """Return the benchmark with wrappers, then pixels, if given."""
    if wrappers:
        benchmark = WithWrappers(benchmark, wrappers)
    return benchmark if pixels is None else pixels(benchmark)


def _wrapped_in(make: MakeWrapper, env: gym.Env) -> gym.Env:
    """Wrap an environment."""
    wrapped = make(env)
    for layer in layers_of(wrapped):
        if layer is env:
            break
        for kind, reason in REFUSED.items():
            if isinstance(layer, kind):
                raise ConfigurationError(f"data.wrappers: {_name(make)} is not supported: {reason}")
    return wrapped


def _checked_spaces(task: str, env: gym.Env) -> tuple[Box, Box]:
    """Return the spaces of a wrapped environment."""
    observations, actions = env.observation_space, env.action_space
    wrong = wrong_observations(observations) or wrong_actions(actions)
    if wrong is not None:
        raise ConfigurationError(f"task {task!r}, after {_changed_last(env)}: {wrong}")
    assert isinstance(observations, Box) and isinstance(actions, Box)
    if not (np.all(actions.low == -1) and np.all(actions.high == 1)):
        raise ConfigurationError(
            f"task {task!r}: after {_changed_last(env, 'action_space')} actions lie in {actions},"
            f" but must lie in [-1, 1]: append {{class_path: {GYMNASIUM}.RescaleAction, init_args:"
            " {min_action: -1, max_action: 1}} to data.wrappers if they are bounded"
        )
    return observations, actions


def _changed_last(env: gym.Env, name: str | None = None) -> str:
    """Return the outermost wrapper, or the outermost one that changes a space."""
    for layer in layers_of(env):
        inner = layer.env if isinstance(layer, gym.Wrapper) else None
        if inner is None or name is None or getattr(layer, name) != getattr(inner, name):
            return type(layer).__name__
    raise AssertionError("the innermost layer has no environment")


def time_limits(env: gym.Env) -> list[int]:
    """Return the limit of each ``TimeLimit`` of an environment."""
    # environments made by functions have no ``spec`` from which to read the limit
    return [
        layer._max_episode_steps
        for layer in layers_of(env)
        if isinstance(layer, gymnasium_wrappers.TimeLimit)
    ]


def _resolved(wrapper: Wrapper) -> MakeWrapper:
    """Return the function that wraps an environment."""
    if isinstance(wrapper, Mapping):
        make = _imported(wrapper["class_path"])
        arguments = _arguments(make, wrapper.get("init_args") or {})
        return functools.partial(make, **arguments) if arguments else make
    return _imported(wrapper) if isinstance(wrapper, str) else wrapper


def _imported(path: str) -> Any:
    """Return a class or function by its import path."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"data.wrappers contains {path!r}, which cannot be imported: {error}"
        ) from error


def _arguments(make: MakeWrapper, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a wrapper's arguments, with import paths and objects resolved."""
    parameters = inspect.signature(make).parameters
    resolved: dict[str, Any] = {}
    for name, value in options.items():
        takes_function = name in parameters and "Callable" in str(parameters[name].annotation)
        if isinstance(value, str) and takes_function:
            resolved[name] = _imported(value)
        elif isinstance(value, Mapping) and "class_path" in value:
            # an object to instantiate, such as a space
            resolved[name] = _imported(value["class_path"])(**value.get("init_args") or {})
        else:
            resolved[name] = value
    return resolved


def _name(make: Any) -> str:
    """Describe a wrapper by its shortest import path and its arguments."""
    if isinstance(make, functools.partial) and not make.args:
        return f"{_name(make.func)} {values_text(make.keywords)}"
    name = getattr(make, "__name__", "")
    if getattr(gymnasium_wrappers, name, None) is make:
        return f"{GYMNASIUM}.{name}"
    return callable_name(make)
