"""A group of environments, stepped one after another in the process that has this object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.envs.state.simulator import StabilityCheck
from mtrl_lightning.envs.state.state import EnvState, layers_of
from mtrl_lightning.envs.vector.midway_starts import MidwayStarts
from mtrl_lightning.envs.vector.shared_arrays import StepArrays
from mtrl_lightning.envs.vector.spaces import wrong_actions
from mtrl_lightning.envs.vector.success_limit import SuccessLimit
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
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
            _check_observations(name, env, spec.observation_space)
        self._states = [EnvState(env) for env in self._envs]
        self._stability = [StabilityCheck(state.simulations) for state in self._states]
        self._arrays = arrays
        self._first = plan.first
        self._info_fields = spec.info_fields
        self._info_keys = [(key, info_column(key)) for key in spec.info_keys]
        self._steps = [0] * len(self._envs)

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
            EnvironmentFaultError: if an environment raises, returns a NaN or an infinite number, or
                its simulation becomes unstable.
            ConfigurationError: if ``info`` lacks one of the spec's ``info_fields``, or one of its
                ``info_keys`` is no number.
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
                observation, reward, terminated, truncated, info = env.step(
                    arrays["action"][row].copy()
                )
            except ConfigurationError:
                raise
            except Exception as error:
                raise self._fault(i, f"{type(error).__name__}: {error}") from error
            unstable = self._stability[i].warnings()
            if unstable:
                raise self._fault(
                    i,
                    f"MuJoCo reset the simulation because it became unstable ({unstable});"
                    " use a smaller time step or smaller actions",
                )
            if not math.isfinite(reward):
                raise self._fault(i, f"the reward is {reward}; fix the environment or its actions")
            self._check_finite(i, observation)
            arrays["next_observation"][row] = observation
            arrays["reward"][row] = reward
            arrays["terminated"][row] = terminated
            arrays["truncated"][row] = truncated
            arrays["success"][row] = bool(info.get("success", False))
            arrays["midway"][row] = isinstance(env, MidwayStarts) and env.is_midway
            if self._info_fields:
                self._write_info(i, info)
            if self._info_keys:
                self._write_logged_info(i, info)
            if terminated or truncated:
                self._reset(i)
            else:
                arrays["observation"][row] = observation
            arrays["active"][row] = False

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
        except ConfigurationError:
            raise
        except Exception as error:
            raise self._fault(i, f"{type(error).__name__}: {error}") from error
        if isinstance(env, MidwayStarts):
            self._arrays["repeated"][row] += env.repeated_steps - repeated_steps
        self._check_finite(i, observation)
        self._stability[i].clear()
        self._arrays["observation"][row] = observation
        self._arrays["active"][row] = False

    def _write_info(self, i: int, info: dict[str, Any]) -> None:
        for field in self._info_fields:
            if field.name not in info:
                raise ConfigurationError(
                    f"{self._where(i)}: info has no {field.name!r},"
                    " one of the benchmark's info_fields:"
                    " report it in every step, or remove it from EnvSpec.info_fields"
                )
            value = np.asarray(info[field.name])
            if value.shape != field.shape:
                raise ConfigurationError(
                    f"{self._where(i)}: info[{field.name!r}] has the shape {value.shape},"
                    f" EnvSpec.info_fields says {field.shape}: make them agree"
                )
            if not np.isfinite(value).all():
                raise self._fault(
                    i, f"info[{field.name!r}] is {info[field.name]}; fix the environment"
                )
            self._arrays[field.name][self._first + i] = value

    def _write_logged_info(self, i: int, info: dict[str, Any]) -> None:
        """Write the numbers that are logged; NaN where this step does not report one."""
        for key, column in self._info_keys:
            value = info.get(key)
            number = np.asarray(math.nan if value is None else value)
            if number.ndim or number.dtype.kind not in "biuf":
                raise ConfigurationError(
                    f"{self._where(i)}: info[{key!r}] is {value!r}, one of data.info_keys:"
                    " name only numbers, or let the environment report its parts"
                )
            self._arrays[column][self._first + i] = number

    def _check_finite(self, i: int, observation: npt.NDArray) -> None:
        observation = np.asarray(observation)
        if observation.dtype.kind == "u":
            return  # such as pixels
        if (
            observation.ndim == 1
            and observation.dtype.char in "fd"
            and math.isfinite(observation.dot(observation))
        ):
            return  # the cheaper test; where squares overflow, the numbers may still be finite
        if not np.isfinite(observation).all():
            indices = np.flatnonzero(~np.isfinite(observation))[:5].tolist()
            raise self._fault(
                i,
                f"the observation is not finite at {indices}; fix the environment or its actions",
            )

    def _fault(self, i: int, reason: str) -> EnvironmentFaultError:
        return EnvironmentFaultError(f"{self._where(i)}: {reason}")

    def _where(self, i: int) -> str:
        return f"task {self._names[i]!r}, step {self._steps[i]} of its episode"


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


def _check_observations(name: str, env: gym.Env, expected: Box) -> None:
    space = getattr(env, "observation_space", None)
    # one number would be repeated over a whole row of the arrays
    if isinstance(space, Box) and space.shape != expected.shape:
        raise ConfigurationError(
            f"task {name!r}: its observation space is {space}, and the benchmark's spec says"
            f" {expected}: make them agree, for example with envs.pad_to_spec"
        )
