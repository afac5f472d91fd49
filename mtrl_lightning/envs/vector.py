"""Many environments stepped at once, in worker processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from mtrl_lightning.envs.benchmark import Benchmark
from mtrl_lightning.envs.worker import DONE, STEP, EnvGroup, arrays_in, num_bytes, run_worker
from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from mtrl_lightning.types import StepResult


def default_num_workers(num_envs: int, spare: int = 1) -> int:
    """Return the number of usable cores less ``spare``, at least one and at most one an environment."""
    affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))  # macOS has none
    return max(1, min(num_envs, len(affinity(0)) - spare))


class VectorEnv(gym.vector.VectorEnv):
    """Environments of a benchmark, stepped together.

    What comes out does not depend on the number of workers: an environment's draws depend on ``seed`` and its
    place alone. Besides Gymnasium's ``step`` there are ``send`` and ``receive``, between which the caller may work.

    Args:
        benchmark: makes the environments.
        tasks: the task of each environment, so that a task may have several.
        split: one of ``benchmark.splits``.
        seed: of all draws.
        num_workers: processes; 0 steps in this one; None takes the cores but one.
        timeout: seconds to wait for a worker's answer.

    Raises:
        ConfigurationError: if the split or a task is unknown, or the number of workers negative.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(
        self, benchmark: Benchmark, tasks: Sequence[int], split: str = "train", *,
        seed: int = 0, num_workers: int | None = None, timeout: float = 300.0,
    ) -> None:  # fmt: skip
        if split not in benchmark.splits:
            raise ConfigurationError(f"unknown split {split!r}: the benchmark has {', '.join(benchmark.splits)}")
        if num_workers is not None and num_workers < 0:
            raise ConfigurationError(f"num_workers is {num_workers}: give 0 (in this process) or more")
        spec = benchmark.spec
        if not tasks or not all(0 <= task < spec.num_tasks for task in tasks):
            raise ConfigurationError(f"tasks are {list(tasks)}: give some, each from 0 to {spec.num_tasks - 1}")
        self.spec_ = spec
        self.num_envs = len(tasks)
        self.task_E = np.asarray(tasks, np.int64)
        self.single_observation_space = spec.observation_space
        self.single_action_space = spec.action_space
        self.observation_space = batch_space(spec.observation_space, self.num_envs)
        self.action_space = batch_space(spec.action_space, self.num_envs)
        self._timeout = timeout
        self._return_E = np.zeros(self.num_envs)
        self._length_E = np.zeros(self.num_envs, np.int64)

        seeds = [int(s.generate_state(1)[0]) for s in np.random.SeedSequence(seed).spawn(self.num_envs)]
        workers = default_num_workers(self.num_envs) if num_workers is None else min(num_workers, self.num_envs)
        context = multiprocessing.get_context("spawn")
        size = num_bytes(self.num_envs, spec)
        buffer: Any = context.RawArray("B", size) if workers else bytearray(size)
        self._arrays = arrays_in(buffer, self.num_envs, spec)
        self._slices = [
            (int(part[0]), int(part[-1]) + 1) for part in np.array_split(range(self.num_envs), workers or 1)
        ]
        self._group: EnvGroup | None = None
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        self._finalizer = weakref.finalize(self, _stop, self._connections, self._processes)
        if not workers:
            self._group = EnvGroup(benchmark, tasks, split, seeds, self._arrays, 0)
            return
        for i, (first, end) in enumerate(self._slices):
            here, there = context.Pipe()
            args = (there, benchmark, list(tasks[first:end]), split, seeds[first:end], buffer, self.num_envs, first)
            process = context.Process(target=run_worker, args=args, name=f"environments-{i}", daemon=True)
            with _signals_blocked():
                process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    @property
    def num_workers(self) -> int:
        """Number of worker processes."""
        return len(self._processes)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.pid for process in self._processes]

    def send(self, action_EA: npt.NDArray) -> None:
        """Hand over actions and let the workers step.

        Raises:
            EnvironmentFaultError: if an action is not finite; MuJoCo would silently reset the simulation.
        """
        finite_E = np.isfinite(action_EA).all(-1)
        if not finite_E.all():
            names = self._names(self.task_E[~finite_E])
            raise EnvironmentFaultError(
                f"the policy's actions for {names} are not finite: the training diverged; lower the learning rates"
            )
        self._arrays.action_EA[:] = action_EA
        for connection in self._connections:
            self._try(connection.send_bytes, STEP)

    def receive(self) -> StepResult:
        """Wait for the step that ``send`` began.

        Raises:
            EnvironmentFaultError: if an environment raised or returned a NaN, or a worker died or hung.
        """
        if self._group is not None:
            self._group.step()
        self._answers()
        results = (array.copy() for array in self._arrays[1:])
        return StepResult._make((*results, np.ones(self.num_envs, np.bool_)))

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray, dict[str, Any]]:
        """Begin an episode in every environment; a single seed gives environment ``i`` the seed ``seed + i``."""
        if seed is None or isinstance(seed, (int, np.integer)):
            seed = [None if seed is None else int(seed) + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ConfigurationError(f"{len(seed)} seeds are given for {self.num_envs} environments")
        self._each("reset", [(list(seed[first:end]), options) for first, end in self._slices])
        self._return_E[:] = 0
        self._length_E[:] = 0
        return self._arrays.observation_ED.copy(), {}

    def step(self, actions: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray, npt.NDArray, dict[str, Any]]:
        """Step as Gymnasium's vector environments do; an ended episode's last observation is ``info["final_obs"]``."""
        self.send(actions)
        result = self.receive()
        self._return_E += result.reward_E
        self._length_E += 1
        everywhere = np.ones(self.num_envs, np.bool_)
        success_E = result.success_E.astype(np.float64)
        info: dict[str, Any] = {"success": success_E, "_success": everywhere}
        done_E = result.terminated_E | result.truncated_E
        if done_E.any():
            final = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(done_E):
                final[i] = result.next_observation_ED[i]
            episode = {"r": np.where(done_E, self._return_E, 0.0), "l": np.where(done_E, self._length_E, 0)}
            info |= {"final_obs": final, "_final_obs": done_E, "_final_info": done_E}
            info["final_info"] = {"success": success_E, "_success": done_E, "episode": episode, "_episode": done_E}
            self._return_E[done_E] = 0
            self._length_E[done_E] = 0
        return result.observation_ED, result.reward_E, result.terminated_E, result.truncated_E, info

    def get_state(self) -> list[dict[str, Any]]:
        """Return the state of every environment: all that its future depends on."""
        return [state for states in self._each("get_state", [()] * len(self._slices)) for state in states]

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore the state of every environment."""
        self._each("set_state", [(list(states[first:end]),) for first, end in self._slices])

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an attribute of every environment, called with the arguments if it is callable."""
        parts = self._each("call", [(name, *args)] * len(self._slices), kwargs)
        return tuple(value for part in parts for value in part)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment."""
        return self.call(name)

    def close_extras(self, **kwargs: Any) -> None:
        """End the workers."""
        if self._group is not None:
            self._group.close()
        self._finalizer()

    def _each(self, method: str, arguments: list[tuple], keywords: dict[str, Any] | None = None) -> list[Any]:
        if self._group is not None:
            return [getattr(self._group, method)(*arguments[0], **(keywords or {}))]
        for connection, args in zip(self._connections, arguments, strict=True):
            self._try(connection.send_bytes, pickle.dumps((method, args, keywords or {})))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Return every worker's answer; a fault is raised when all have answered, so that none is left in a pipe."""
        answers, faults = [], []
        for i in range(len(self._connections)):
            try:
                answers.append(self._answer(i))
            except EnvironmentFaultError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
        return answers

    def _try(self, send: Any, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the worker is dead: `_answer` says so
            send(message)

    def _names(self, task_N: npt.NDArray[np.int64]) -> str:
        return ", ".join(dict.fromkeys(self.spec_.task_names[task] for task in task_N))

    def _answer(self, i: int) -> Any:
        first, end = self._slices[i]
        names = self._names(self.task_E[first:end])
        if not self._connections[i].poll(self._timeout):
            raise EnvironmentFaultError(
                f"the worker of {names} gave no answer for {self._timeout:g} s; continue from a checkpoint"
            )
        try:
            message = self._connections[i].recv_bytes()
        except (EOFError, ConnectionResetError):
            self._processes[i].join(5)
            code = self._processes[i].exitcode
            raise EnvironmentFaultError(
                f"the worker of {names} died (exit code {code}); continue from a checkpoint"
            ) from None
        if message == DONE:
            return None
        value, fault = pickle.loads(message)
        if fault is not None:
            raise EnvironmentFaultError(fault)
        return value


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Let a process start deaf to Ctrl-C and SIGTERM, which a terminal sends to it before it can ignore them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # the first start of a process starts it too, and unblocks the signals
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _stop(connections: list[Connection], processes: list[Any]) -> None:
    """Close the pipes, at which the workers end; kill those that do not."""
    for connection in connections:
        connection.close()
    deadline = time.monotonic() + 5
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    connections.clear()
    processes.clear()
