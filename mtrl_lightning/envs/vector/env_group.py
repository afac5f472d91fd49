"""A group of environments, stepped sequentially in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.envs.simulator import StabilityCheck, simulations_of
from mtrl_lightning.envs.step_values import (
    read_flag,
    read_reward,
    read_success,
    write_array,
)
from mtrl_lightning.envs.vector.episodes import Episodes
from mtrl_lightning.envs.vector.global_random import GlobalRandom, may_draw, seed_global_generators
from mtrl_lightning.envs.vector.midway_starts import MidwayStarts
from mtrl_lightning.envs.vector.shared_arrays import StepArrays
from mtrl_lightning.envs.vector.spaces import wrong_actions
from mtrl_lightning.envs.vector.success_limit import SuccessLimit
from mtrl_lightning.errors import CallError, ConfigurationError, EnvironmentFaultError
from mtrl_lightning.transitions import info_column

ROUNDING = 1e-6
"""Absolute and relative tolerance between the observations of an episode and its replay, because
rounding differs between CPUs."""


class GroupPlan(NamedTuple):
    """Arguments of a group of environments."""

    benchmark: Benchmark
    tasks: Sequence[int]
    """Task of each environment."""
    split: str
    """One of ``benchmark.splits``."""
    seeds: Sequence[int]
    """Seed of each environment, which determines the seeds of its episodes."""
    num_envs: int
    """Number of environments of all groups, which share the arrays."""
    first: int
    """Row of the group's first environment in the arrays; the others follow."""
    midway_starts: float = 0.0
    """See ``MidwayStarts``; 0 for none."""
    after_success: int | None = None
    """See ``SuccessLimit``; None for none."""
    is_rebuilt: bool = False
    """Whether the group replaces a faulty one."""


class EnvGroup:
    """Environments stepped sequentially.

    Args:
        plan: the group's arguments.
        arrays: arrays from which actions are read and to which results are written.
    """

    def __init__(self, plan: GroupPlan, arrays: StepArrays) -> None:
        spec = plan.benchmark.spec
        self._names = [spec.task_names[task] for task in plan.tasks]
        is_numbered = plan.split != plan.benchmark.splits[0]
        self.draws_globally = False
        """Whether an environment may use the global random generators."""
        self._envs: list[Episodes] = []
        for task, seed in zip(plan.tasks, plan.seeds, strict=True):
            seed_global_generators(seed)
            env = plan.benchmark.make_env(task, plan.split, seed)
            if may_draw(env):
                self.draws_globally = True
                env = GlobalRandom(env, seed)
            if plan.after_success is not None:
                env = SuccessLimit(env, plan.after_success)
            if plan.midway_starts:
                env = MidwayStarts(env, spec, plan.midway_starts)
            self._envs.append(Episodes(env, seed, is_numbered))
        for name, env in zip(self._names, self._envs, strict=True):
            _check_actions(name, env, spec.action_space)
        self._stability = [StabilityCheck(simulations_of(env)) for env in self._envs]
        self._arrays = arrays
        self._first = plan.first
        self._info_fields = spec.info_fields
        self._info_keys = [(key, info_column(key)) for key in spec.info_keys]
        self._has_success = spec.has_success
        self._has_stepped = [plan.is_rebuilt] * len(self._envs)
        """Whether an environment has made a step, which rules out an error in its definition."""

    def reset(
        self,
        seeds: Sequence[int | None],
        options: dict | None,
        mask: Sequence[bool] | None = None,
    ) -> None:
        """Start an episode in every environment, or in those selected by the mask."""
        for i, seed in enumerate(seeds):
            if mask is None or mask[i]:
                self._reset(i, seed, options)

    def reset_some(self, which: Sequence[int]) -> None:
        """Start an episode in the environments with these indices in the group."""
        for i in which:
            self._reset(i)

    def step(self) -> None:
        """Step every environment with its row of the actions, and reset it if its episode ends.

        Paused environments are skipped.

        Raises:
            EnvironmentFaultError: if an environment raises or returns a number that is not finite
                in single precision, or its simulation becomes unstable.
            CallError: if an environment raises in its first step or reset.
        """
        arrays = self._arrays
        for i, env in enumerate(self._envs):
            row = self._first + i
            if arrays["paused"][row]:
                continue
            arrays["episode_step"][row] = env.num_steps + 1
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

    def _step(self, i: int, env: Episodes) -> bool:
        """Step an environment, write the results, and return whether its episode is over."""
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
        arrays["midway"][row] = env.is_midway
        if self._info_fields:
            self._write_info(row, info)
        if self._info_keys:
            self._write_logged_info(row, info)
        return is_terminated or is_truncated

    def get_state(self) -> list[dict[str, Any]]:
        """Return the states from which every environment's episode is replayed, as plain values.

        They contain at most the actions of an episode and, with midway starts, of its beginnings.
        """
        rows = self._arrays["observation"][self._first :]
        return [
            {**env.get_state(), "observation": observation.tolist()}
            for env, observation in zip(self._envs, rows, strict=False)
        ]

    def set_state(self, states: Sequence[dict[str, Any]]) -> list[bool]:
        """Replay every environment's episode; return where this led to the saved observation.

        Otherwise, a new episode starts. ``{"seed": s}`` starts one with that seed.
        """
        continues = []
        for i, state in enumerate(states):
            is_continued = "actions" in state and self._repeat(i, state)
            if not is_continued:
                self._reset(i, None if "actions" in state else state["seed"])
            continues.append(is_continued)
        return continues

    def _repeat(self, i: int, state: dict[str, Any]) -> bool:
        row = self._arrays["observation"][self._first + i]
        saved = np.array(state["observation"], row.dtype)
        try:
            observation = self._envs[i].repeat(state)
            if state["number"] < 0:  # saved before its first episode
                return True
            if observation is None:
                return False
            write_array("the observation", row, observation)
        except Exception:  # the saved episode raised none, so that this environment must differ
            return False
        self._stability[i].clear()
        self._has_stepped[i] = True
        return np.allclose(row, saved, ROUNDING, ROUNDING)

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Return an attribute of every environment, called with the arguments if it is callable."""
        attributes = [episodes.env.get_wrapper_attr(name) for episodes in self._envs]
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
        self._arrays["episode_step"][row] = 0
        self._arrays["active"][row] = True
        repeated_steps = self._envs[i].repeated_steps
        try:
            observation, _ = self._envs[i].reset(seed=seed, options=options)
            write_array("the observation", self._arrays["observation"][row], observation)
        except Exception as error:
            raise self._located(i, error) from error
        self._arrays["repeated"][row] += self._envs[i].repeated_steps - repeated_steps
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
        """Write the logged numbers; NaN for keys that this step does not report."""
        for key, column in self._info_keys:
            value = info.get(key)
            number = np.asarray(math.nan if value is None else value)
            if number.ndim or number.dtype.kind not in "biuf":
                raise ConfigurationError(
                    f"info[{key!r}] is {value!r}, but data.info_keys must be numbers: remove it, or"
                    " let the environment report its parts"
                )
            self._arrays[column][row] = number

    def _located(self, i: int, error: Exception) -> Exception:
        """Add task and step to the error of a step or reset."""
        where = f"task {self._names[i]!r}, step {self._envs[i].num_steps} of its episode"
        if isinstance(error, (ConfigurationError, EnvironmentFaultError)):
            return type(error)(f"{where}: {error}")
        text = f"{where}: {type(error).__name__}: {error}"
        if self._has_stepped[i]:
            return EnvironmentFaultError(text)
        return CallError(f"{text} (gymnasium.utils.env_checker.check_env may find the cause)")


def _check_actions(name: str, env: gym.Env, expected: Box) -> None:
    space = getattr(env, "action_space", None)
    if space is None:
        return  # nothing to compare
    wrong = wrong_actions(space)
    if wrong is None and space.shape != expected.shape:
        wrong = (
            f"its action space is {space}, but the benchmark's spec has {expected}:"
            " make them agree, for example with envs.pad_to_spec"
        )
    if wrong is not None:
        raise ConfigurationError(f"task {name!r}: {wrong}")
