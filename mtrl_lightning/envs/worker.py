"""A group of environments stepped one after another, here or in a process of its own.

Observations, actions and rewards lie in arrays that the processes share; a step costs one short
message each way. A worker ends by itself when the main process closes its pipe or dies.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from mtrl_lightning.envs.benchmark import Benchmark
from mtrl_lightning.envs.state import EnvState
from mtrl_lightning.errors import CallError, ConfigurationError, EnvironmentFaultError
from mtrl_lightning.types import EnvSpec

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
"""The main process acts on these, and a terminal or a cluster sends them to its workers too."""
STEP = b"step"
DONE = b"done"
PATIENCE = 2e-4
"""Seconds that a worker stays awake for the next message: waking it costs its sender a tenth of a step of ten tasks."""


class StepArrays(NamedTuple):
    """One row an environment."""

    action_EA: npt.NDArray[np.float32]
    observation_ED: npt.NDArray
    next_observation_ED: npt.NDArray
    reward_E: npt.NDArray[np.float64]
    terminated_E: npt.NDArray[np.bool_]
    truncated_E: npt.NDArray[np.bool_]
    success_E: npt.NDArray[np.bool_]
    step_E: npt.NDArray[np.int64]
    """The step of its episode that an environment is in or has made last."""
    active_E: npt.NDArray[np.bool_]
    """Whether the environment is being stepped or reset at this moment: what a dead worker was at."""


def _layout(
    num_envs: int, observation_space: Box, action_space: Box
) -> list[tuple[tuple[int, ...], Any]]:
    observation = ((num_envs, *observation_space.shape), observation_space.dtype)
    flag = ((num_envs,), np.bool_)
    action = ((num_envs, *action_space.shape), np.float32)
    return [
        action,
        observation,
        observation,
        ((num_envs,), np.float64),
        flag,
        flag,
        flag,
        ((num_envs,), np.int64),
        flag,
    ]


def num_bytes(num_envs: int, spec: EnvSpec) -> int:
    """Return the size of the buffer that ``arrays_in`` needs."""
    layout = _layout(num_envs, spec.observation_space, spec.action_space)
    return sum(
        -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64 for shape, dtype in layout
    )


def arrays_in(buffer: Any, num_envs: int, spec: EnvSpec) -> StepArrays:
    """Lay the arrays out in a buffer, each on a cache line of its own."""
    arrays, offset = [], 0
    for shape, dtype in _layout(num_envs, spec.observation_space, spec.action_space):
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(buffer, dtype, count, offset).reshape(shape))
        offset += -(-count * np.dtype(dtype).itemsize // 64) * 64
    return StepArrays(*arrays)


class EnvGroup:
    """Environments stepped one after another.

    Args:
        benchmark: makes the environments.
        tasks: the task of each environment.
        split: one of ``benchmark.splits``.
        seeds: of each environment's draws.
        arrays: where actions lie and results go.
        first: row of the first environment; the others follow.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        tasks: Sequence[int],
        split: str,
        seeds: Sequence[int],
        arrays: StepArrays,
        first: int,
    ) -> None:
        self._names = [benchmark.spec.task_names[task] for task in tasks]
        self._envs = [
            benchmark.make_env(task, split, seed) for task, seed in zip(tasks, seeds, strict=True)
        ]
        self._states = [EnvState(env) for env in self._envs]
        self._arrays, self._first = arrays, first
        self._steps = [0] * len(self._envs)

    def reset(self, seeds: Sequence[int | None], options: dict | None) -> None:
        """Begin an episode in every environment."""
        for i, (env, seed) in enumerate(zip(self._envs, seeds, strict=True)):
            self._begin(i, env, seed, options)

    def begin(self, which: Sequence[int]) -> None:
        """Begin an episode in some environments, told by their place in the group."""
        for i in which:
            self._begin(i, self._envs[i], None, None)

    def step(self) -> None:
        """Step every environment by its row of the actions; where an episode ends, begin the next one at once.

        Raises:
            EnvironmentFaultError: if an environment raises, or returns a NaN or an infinite number.
        """
        arrays = self._arrays
        for i, env in enumerate(self._envs):
            row = self._first + i
            arrays.step_E[row] = self._steps[i] = self._steps[i] + 1
            arrays.active_E[row] = True
            try:
                observation, reward, terminated, truncated, info = env.step(
                    arrays.action_EA[row].copy()
                )
            except Exception as error:
                raise EnvironmentFaultError(
                    f"{self._where(i)}: {type(error).__name__}: {error}"
                ) from error
            if not math.isfinite(reward):
                raise EnvironmentFaultError(
                    f"{self._where(i)}: the reward is {reward}; fix the environment or its actions"
                )
            self._check_finite(i, observation)
            arrays.next_observation_ED[row] = observation
            arrays.reward_E[row] = reward
            arrays.terminated_E[row] = terminated
            arrays.truncated_E[row] = truncated
            arrays.success_E[row] = bool(info.get("success", False))
            if terminated or truncated:
                self._begin(i, env, None, None)
            else:
                arrays.observation_ED[row] = observation
            arrays.active_E[row] = False

    def get_state(self) -> list[dict[str, Any]]:
        """Return every environment's state."""
        return [
            {"steps": steps, "env": s.get()}
            for steps, s in zip(self._steps, self._states, strict=True)
        ]

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore every environment's state; one of ``{"seed": s}`` begins an episode with that seed."""
        for i, state in enumerate(states):
            if "seed" in state:
                self._begin(i, self._envs[i], state["seed"], None)
            else:
                self._steps[i] = state["steps"]
                self._states[i].set(state["env"])

    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Return an attribute of every environment, called with the arguments if it is callable."""
        attributes = [env.get_wrapper_attr(name) for env in self._envs]
        return [
            attribute(*args, **kwargs) if callable(attribute) else attribute
            for attribute in attributes
        ]

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()

    def _begin(self, i: int, env: gym.Env, seed: int | None, options: dict | None) -> None:
        row = self._first + i
        self._arrays.step_E[row] = self._steps[i] = 0
        self._arrays.active_E[row] = True
        try:
            observation, _ = env.reset(seed=seed, options=options)
        except Exception as error:
            raise EnvironmentFaultError(
                f"{self._where(i)}: {type(error).__name__}: {error}"
            ) from error
        self._check_finite(i, observation)
        self._arrays.observation_ED[row] = observation
        self._arrays.active_E[row] = False

    def _check_finite(self, i: int, observation: npt.NDArray) -> None:
        observation = np.asarray(observation)
        if (
            observation.ndim == 1
            and observation.dtype.char in "fd"
            and math.isfinite(observation.dot(observation))
        ):
            return  # the cheaper test; where squares overflow, the numbers may still be finite
        if not np.isfinite(observation).all():
            places = np.flatnonzero(~np.isfinite(observation))[:5].tolist()
            raise EnvironmentFaultError(
                f"{self._where(i)}: the observation is not finite at {places}; fix the environment"
                " or its actions"
            )

    def _where(self, i: int) -> str:
        return f"task {self._names[i]!r}, step {self._steps[i]} of its episode"


def run_worker(
    connection: Connection,
    benchmark: Benchmark,
    tasks: Sequence[int],
    split: str,
    seeds: Sequence[int],
    buffer: Any,
    num_envs: int,
    first: int,
) -> None:
    """Serve a group of environments until the pipe closes or the main process dies."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    group: EnvGroup | None = None
    try:
        while True:
            _stay_awake(connection)
            message = connection.recv_bytes()
            try:
                if group is None:
                    arrays = arrays_in(buffer, num_envs, benchmark.spec)
                    group = EnvGroup(benchmark, tasks, split, seeds, arrays, first)
                if message == STEP:
                    group.step()
                    connection.send_bytes(DONE)
                else:
                    name, args, kwargs = pickle.loads(message)
                    connection.send_bytes(
                        pickle.dumps((getattr(group, name)(*args, **kwargs), None))
                    )
            except (EnvironmentFaultError, ConfigurationError) as error:
                connection.send_bytes(pickle.dumps((None, error)))
            except Exception as error:
                text = "".join(traceback.format_exception(error))
                connection.send_bytes(pickle.dumps((None, CallError(text))))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        pass
    finally:
        if group is not None:
            group.close()


def _stay_awake(connection: Connection) -> None:
    """Wait a moment for a message, leaving the core to whoever wants it."""
    leave = getattr(os, "sched_yield", lambda: time.sleep(0))  # Windows has none
    end = time.perf_counter() + PATIENCE
    while not connection.poll(0) and time.perf_counter() < end:
        leave()


def _end_with_parent() -> None:
    """End this process when the main one is gone, also while an environment hangs in a step."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
