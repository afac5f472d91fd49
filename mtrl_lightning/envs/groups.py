"""A group of environments as the vector environment sees it: ask it something, later take the answer.

``LocalGroup`` lives in this process, ``WorkerGroup`` in one of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

from mtrl_lightning.envs.benchmark import Benchmark
from mtrl_lightning.envs.worker import DONE, SIGNALS, STEP, EnvGroup, arrays_in, run_worker
from mtrl_lightning.errors import EnvironmentFaultError

START_TIMEOUT = 300.0
"""Seconds for a worker's first answer at least: it starts a process, imports a simulator and builds environments."""
CONTEXT = multiprocessing.get_context("spawn")


class GroupPlan(NamedTuple):
    """What a group is made of."""

    benchmark: Benchmark
    tasks: Sequence[int]
    """Task of each environment."""
    split: str
    seeds: Sequence[int]
    """Of each environment's draws."""
    buffer: Any
    """Memory of the arrays that all groups share."""
    num_envs: int
    """Environments of all groups."""
    first: int
    """Row of the group's first environment."""


class LocalGroup:
    """A group in this process; it works when the answer is taken.

    Args:
        plan: what it is made of.
    """

    pid: int | None = None

    def __init__(self, plan: GroupPlan) -> None:
        self._plan = plan
        self._group: EnvGroup | None = None
        self._asked: tuple[str, tuple, dict[str, Any]] = ("", (), {})

    def ask(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Ask for a method of ``EnvGroup``."""
        self._asked = (method, args, kwargs)

    def answer(self) -> Any:
        """Do what was asked, and return its result.

        Raises:
            EnvironmentFaultError: if an environment raises or returns a NaN.
        """
        method, args, kwargs = self._asked
        if self._group is None:
            plan = self._plan
            arrays = arrays_in(plan.buffer, plan.num_envs, plan.benchmark.spec)
            self._group = EnvGroup(
                plan.benchmark, plan.tasks, plan.split, plan.seeds, arrays, plan.first
            )
        return getattr(self._group, method)(*args, **kwargs)

    def close(self) -> None:
        """Close the environments."""
        if self._group is not None:
            self._group.close()

    kill = close


class WorkerGroup:
    """A group in a process of its own, which ends with this object or with the process that made it.

    Args:
        plan: what it is made of.
        name: of the process.
        timeout: seconds to wait for an answer; the first may take longer.
    """

    def __init__(self, plan: GroupPlan, name: str, timeout: float) -> None:
        spec = plan.benchmark.spec
        self._names = [spec.task_names[task] for task in plan.tasks]
        self._arrays, self._first = arrays_in(plan.buffer, plan.num_envs, spec), plan.first
        self._arrays.active_E[plan.first : plan.first + len(plan.tasks)] = False
        self._stepping = False
        self._timeout, self._timeout_now = timeout, max(timeout, START_TIMEOUT)
        self._connection, there = CONTEXT.Pipe()
        self._process: Any = CONTEXT.Process(
            target=run_worker, args=(there, *plan), name=name, daemon=True
        )
        with _signals_blocked():
            self._process.start()
        there.close()
        self._finalizer = weakref.finalize(self, _end, self._connection, self._process, 5.0)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def ask(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Ask for a method of ``EnvGroup``; a step costs the shortest message there is."""
        self._stepping = method == "step"
        message = STEP if self._stepping else pickle.dumps((method, args, kwargs))
        with (
            self._within_timeout(),
            contextlib.suppress(OSError),
        ):  # the worker is dead: `answer` says so
            self._connection.send_bytes(message)

    def answer(self) -> Any:
        """Wait for the result.

        Raises:
            EnvironmentFaultError: if an environment raised or returned a NaN, or the worker died or
                hung.
            ConfigurationError: if an environment cannot be used.
        """
        timeout, self._timeout_now = self._timeout_now, self._timeout
        if not self._connection.poll(timeout):
            raise EnvironmentFaultError(
                f"the worker of {self._all_names()} gave no answer for {timeout:g} s (timeout)"
                f" {self._where()}"
            )
        try:
            with self._within_timeout():
                message = self._connection.recv_bytes()
        except (EOFError, OSError):
            self._process.join(5)
            raise EnvironmentFaultError(
                f"the worker of {self._all_names()} died (exit code {self._process.exitcode})"
                f" {self._where()}"
            ) from None
        if message == DONE:
            return None
        value, error = pickle.loads(message)
        if error is not None:
            raise error
        return value

    @contextlib.contextmanager
    def _within_timeout(self) -> Iterator[None]:
        """Kill a worker that hangs in the middle of a message too large for the pipe; a step's fits."""
        if self._stepping:
            yield
            return
        timer = threading.Timer(max(self._timeout, self._timeout_now), self._process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _all_names(self) -> str:
        return ", ".join(dict.fromkeys(self._names))

    def _where(self) -> str:
        for row, name in enumerate(self._names, self._first):
            if self._arrays.active_E[row]:
                return f"in task {name!r}, step {self._arrays.step_E[row]} of its episode"
        return f"between two steps, after step {self._arrays.step_E[self._first]} of the episode of {self._names[0]!r}"

    def close(self) -> None:
        """End the worker."""
        self._finalizer()

    def kill(self) -> None:
        """End the worker without waiting for it."""
        self._process.kill()
        self._finalizer()


def close_together(groups: Sequence[LocalGroup | WorkerGroup]) -> None:
    """Close groups; all workers are told before the first is waited for."""
    for group in groups:
        if isinstance(group, WorkerGroup):
            group._connection.close()
    for group in groups:
        group.close()


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Let a process start deaf to signals that a terminal or a cluster sends to it before it can ignore them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # the first start of a process starts it too, and unblocks the signals
    resource_tracker.ensure_running()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _end(connection: Any, process: Any, patience: float) -> None:
    """Close the pipe, at which the worker ends; kill it if it does not."""
    connection.close()
    process.join(patience)
    if process.is_alive():
        process.kill()
        process.join()
