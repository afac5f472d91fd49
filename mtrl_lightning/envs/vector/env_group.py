"""A group of environments, stepped one after another in the process that has this object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.envs.state.simulator import StabilityCheck
from mtrl_lightning.envs.state.state import EnvState, layers_of
from mtrl_lightning.envs.step_values import (
    read_flag,
    read_reward,
    read_success,
    write_array,
)
from mtrl_lightning.envs.vector.midway_starts import MidwayStarts
from mtrl_lightning.envs.vector.shared_arrays import StepArrays
from mtrl_lightning.envs.vector.spaces import wrong_actions
from mtrl_lightning.envs.vector.success_limit import SuccessLimit
from mtrl_lightning.errors import CallError, ConfigurationError, EnvironmentFaultError
from mtrl_lightning.schema import info_column

OPTIONS = {MidwayStarts.__name__: "StartMidway", SuccessLimit.__name__: "EndAfterSuccess"}
"""Wrappers of training environments, and the elements of ``data.extras`` that add them."""


class GroupPlan(NamedTuple):
    """Arguments of a group of environments."""

    benchmark: Benchmark
    tasks: Sequence[int]
    """Task of each environment."""
    split: str
    """One of ``benchmark.splits``."""
    seeds: Sequence[int]
    """Seed of each environment's random generator."""
    num_envs: int
    """Number of environments of all groups, which share the arrays."""
    first: int
    """Row of the group's first environment in the arrays; the others follow."""
    midway_starts: float = 0.0
    """See ``MidwayStarts``; 0 for none."""
    after_success: int | None = None
    """See ``SuccessLimit``; None for none."""
    is_rebuilt: bool = False
    """Whether the group replaces one that broke."""


class EnvGroup:
    """Environments stepped one after another.

    Args:
        plan: the group's arguments.
        arrays: where actions are read and results written.

    Raises:
        ConfigurationError: if an environment's spaces are not those of the benchmark's spec.
    """

    def __init__(self, plan: GroupPlan, arrays: StepArrays) -> None:
        spec = plan.benchmark.spec
        self._names = [spec.task_names[task] for task in plan.tasks]
        self._envs: list[gym.Env] = []
        for row, (task, seed) in enumerate(zip(plan.tasks, plan.seeds, strict=True), plan.first):
            env = plan.benchmark.make_env(task, plan.split, seed)
            if plan.after_success is not None:
                env = SuccessLimit(env, plan.after_success)
            if plan.midway_starts:
                env = MidwayStarts(env, spec, seed, plan.midway_starts)
            self._envs.append(env)
            arrays["built"][row] = True
        for name, env in zip(self._names, self._envs, strict=True):
            _check_actions(name, env, spec.action_space)
        self._states = [EnvState(env) for env in self._envs]
        self._stability = [StabilityCheck(state.simulations) for state in self._states]
        self._arrays = arrays
        self._first = plan.first
        self._info_fields = spec.info_fields
        self._info_keys = [(key, info_column(key)) for key in spec.info_keys]
        self._has_success = spec.has_success
        self._steps = [0] * len(self._envs)
        self._has_stepped = [plan.is_rebuilt] * len(self._envs)
        """Whether an environment has made a step, so that it is not wrong from the start."""

    def reset(
        self,
        seeds: Sequence[int | None],
        options: dict | None,
        mask: Sequence[bool] | None = None,
    ) -> None:
        """Start an episode in every environment, or in those of the mask."""
        for i, seed in enumerate(seeds):
            if mask is None or mask[i]:
                self._reset(i, seed, options)

    def reset_some(self, which: Sequence[int]) -> None:
        """Start an episode in some environments, given by their indices in the group."""
        for i in which:
            self._reset(i)

    def step(self) -> None:
        """Step every environment by its row of the actions; reset it where its episode ends.

        Paused ones are left as they are.

        Raises:
            EnvironmentFaultError: if an environment raises, returns a number that is not finite in
                single precision, or its simulation becomes unstable.
            CallError: if an environment raises in its first step or reset.
            ConfigurationError: if a returned value has another type or shape than the spec has.
        """
        arrays = self._arrays
        for i, env in enumerate(self._envs):
            row = self._first + i
            if arrays["paused"][row]:
                continue
            self._steps[i] += 1
            arrays["episode_step"][row] = self._steps[i]
            arrays["active"][row] = True
            try:
                is_over = self._step(i, env)
            except Exception as error:
                raise self._located(i, error) from error
            self._has_stepped[i] = True
            if is_over:
                self._reset(i)
            else:
                arrays["observation"][row] = arrays["next_observation"][row]
            arrays["active"][row] = False

    def _step(self, i: int, env: gym.Env) -> bool:
        """Step an environment, and write what it returns; return whether its episode is over."""
        arrays = self._arrays
        row = self._first + i
        observation, reward, terminated, truncated, info = env.step(arrays["action"][row].copy())
        unstable = self._stability[i].warnings()
        if unstable:
            raise EnvironmentFaultError(
                f"MuJoCo reset the simulation because it became unstable ({unstable});"
                " use a smaller time step or smaller actions"
            )
        write_array("the observation", arrays["next_observation"][row], observation)
        arrays["reward"][row] = read_reward(reward)
        arrays["terminated"][row] = is_terminated = read_flag("terminated", terminated)
        arrays["truncated"][row] = is_truncated = read_flag("truncated", truncated)
        arrays["success"][row] = self._has_success and read_success(info)
        arrays["midway"][row] = isinstance(env, MidwayStarts) and env.is_midway
        self._write_info(row, info)
        self._write_logged_info(row, info)
        return is_terminated or is_truncated

    def get_state(self) -> list[dict[str, Any]]:
        """Return every environment's state; ``{"unsavable": reason}`` if it cannot be saved."""
        states: list[dict[str, Any]] = []
        for steps, state in zip(self._steps, self._states, strict=True):
            try:
                states.append({"steps": steps, "env": state.get()})
            except ConfigurationError as error:
                states.append({"unsavable": str(error)})
        return states

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore every environment's state; ``{"seed": s}`` starts an episode with that seed."""
        for i, state in enumerate(states):
            if "seed" in state:
                self._reset(i, state["seed"])
            else:
                self._check_options(i, state["env"])
                self._steps[i] = state["steps"]
                self._states[i].set(state["env"])
                self._stability[i].clear()

    def _check_options(self, i: int, state: Sequence[Any]) -> None:
        """Check that a state is of an environment with the same wrappers of this package."""
        layers_there = {layer[0] for layer in state[1:]}
        layers_here = {type(layer).__name__ for layer in layers_of(self._envs[i])}
        for wrapper, option in OPTIONS.items():
            is_there = wrapper in layers_there
            if is_there != (wrapper in layers_here):
                there, here = ("with", "without") if is_there else ("without", "with")
                raise ConfigurationError(
                    f"the checkpoint is of a run {there} {option} in data.extras, this run is"
                    f" {here} it: give the previous extras, or start a new run"
                )

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Return an attribute of every environment, called with the arguments if it is callable."""
        attributes = [env.get_wrapper_attr(name) for env in self._envs]
        return [
            attribute(*args, **kwargs) if callable(attribute) else attribute
            for attribute in attributes
        ]

    def close(self) -> None:
        """Close every environment.

        Raises:
            Exception: the first of the environments' errors, after all have been closed.
        """
        errors = []
        for env in self._envs:
            try:
                env.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _reset(self, i: int, seed: int | None = None, options: dict | None = None) -> None:
        row = self._first + i
        self._steps[i] = 0
        self._arrays["episode_step"][row] = 0
        self._arrays["active"][row] = True
        env: gym.Env = self._envs[i]
        repeated_steps = env.repeated_steps if isinstance(env, MidwayStarts) else 0
        try:
            observation, _ = env.reset(seed=seed, options=options)
            write_array("the observation", self._arrays["observation"][row], observation)
        except Exception as error:
            raise self._located(i, error) from error
        if isinstance(env, MidwayStarts):
            self._arrays["repeated"][row] += env.repeated_steps - repeated_steps
        self._stability[i].clear()
        self._arrays["active"][row] = False

    def _write_info(self, row: int, info: dict[str, Any]) -> None:
        for field in self._info_fields:
            if field.name not in info:
                raise ConfigurationError(
                    f"info has no {field.name!r}, one of the benchmark's info_fields:"
                    " report it in every step, or remove it from EnvSpec.info_fields"
                )
            out = self._arrays[field.name][row, ...]
            write_array(f"info[{field.name!r}]", out, info[field.name])

    def _write_logged_info(self, row: int, info: dict[str, Any]) -> None:
        """Write the numbers that are logged; NaN where this step does not report one."""
        for key, column in self._info_keys:
            value = info.get(key)
            number = np.asarray(math.nan if value is None else value)
            if number.ndim or number.dtype.kind not in "biuf":
                raise ConfigurationError(
                    f"info[{key!r}] is {value!r}, one of data.info_keys:"
                    " name only numbers, or let the environment report its parts"
                )
            self._arrays[column][row] = number

    def _located(self, i: int, error: Exception) -> Exception:
        """Return the error of a step or a reset with its task and step."""
        where = f"task {self._names[i]!r}, step {self._steps[i]} of its episode"
        if isinstance(error, (ConfigurationError, EnvironmentFaultError)):
            return type(error)(f"{where}: {error}")
        text = f"{where}: {type(error).__name__}: {error}"
        if self._has_stepped[i]:
            return EnvironmentFaultError(text)
        return CallError(f"{text} (gymnasium.utils.env_checker.check_env may tell what is wrong)")


def _check_actions(name: str, env: gym.Env, expected: Box) -> None:
    space = getattr(env, "action_space", None)
    if space is None:
        return  # there is nothing to compare
    wrong = wrong_actions(space)
    if wrong is None and space.shape != expected.shape:
        wrong = (
            f"its action space is {space}, and the benchmark's spec says {expected}:"
            " make them agree, for example with envs.pad_to_spec"
        )
    if wrong is not None:
        raise ConfigurationError(f"task {name!r}: {wrong}")
