"""Handles of a group of environments, with asynchronous requests and answers.

``LocalGroup`` has its environments in this process, ``WorkerGroup`` in a worker process.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle

from mtrl_lightning.envs.vector.env_group import EnvGroup, GroupPlan
from mtrl_lightning.envs.vector.global_random import global_generators_restored
from mtrl_lightning.envs.vector.shared_arrays import SharedMemory, StepArrays
from mtrl_lightning.envs.vector.worker import DONE, STEP, start_worker
from mtrl_lightning.errors import EnvironmentFaultError

START_TIMEOUT = 300.0
"""Minimum timeout in seconds of a worker's first answer, before which it imports a simulator."""
CLOSE_TIMEOUT = 5.0
"""Seconds after closing its connection until a worker is killed."""


class LocalGroup:
    """A group in this process, which executes requests when the answer is fetched.

    Args:
        plan: the group's arguments.
        arrays: arrays from which actions are read and to which results are written.
    """

    pid: int | None = None

    def __init__(self, plan: GroupPlan, arrays: StepArrays) -> None:
        self._plan = plan
        self._arrays = arrays
        self._group: EnvGroup | None = None
        self._asked: tuple[str, tuple, dict[str, Any]] = ("", (), {})

    def ask(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Request a method call of ``EnvGroup``."""
        self._asked = (method, args, kwargs)

    def answer(self) -> Any:
        """Execute the request, and return its result.

        Raises:
            EnvironmentFaultError: if an environment raises or returns a NaN.
        """
        method, args, kwargs = self._asked
        if self._group is not None and not self._group.draws_globally:
            return getattr(self._group, method)(*args, **kwargs)
        with global_generators_restored():
            if self._group is None:
                self._group = EnvGroup(self._plan, self._arrays)
            return getattr(self._group, method)(*args, **kwargs)

    def close(self) -> None:
        """Close the environments."""
        if self._group is not None:
            self._group.close()

    def kill(self) -> None:
        """Close the environments, ignoring errors."""
        with contextlib.suppress(Exception):
            self.close()


class WorkerGroup:
    """A group in a worker process, which exits with this object or its parent process.

    Args:
        plan: the group's arguments.
        arrays: arrays from which actions are read and to which results are written.
        memory: memory of the arrays.
        name: name of the process.
        timeout: seconds to wait for an answer; the first may take longer.
    """

    def __init__(
        self,
        plan: GroupPlan,
        arrays: StepArrays,
        memory: SharedMemory,
        name: str,
        timeout: float,
    ) -> None:
        spec = plan.benchmark.spec
        self._names = [spec.task_names[task] for task in plan.tasks]
        self._arrays = arrays
        self._first = plan.first
        self._arrays["active"][plan.first : plan.first + len(plan.tasks)] = False
        self._stepping = False
        self._timeout = timeout
        self._timeout_now = max(timeout, START_TIMEOUT)
        self._process, self._connection = start_worker(name, plan, memory)
        self._finalizer = weakref.finalize(self, _end, self._connection, self._process)

    @property
    def pid(self) -> int:
        """Process ID of the worker."""
        return self._process.pid

    def ask(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Request a method call of ``EnvGroup``; a step uses the shortest possible message."""
        self._stepping = method == "step"
        message = STEP if self._stepping else cloudpickle.dumps((method, args, kwargs))
        # If the worker is dead, `answer` reports it.
        with self._within_timeout(), contextlib.suppress(OSError):
            self._connection.send_bytes(message)

    def answer(self) -> Any:
        """Wait for the result.

        Raises:
            EnvironmentFaultError: if an environment raised or returned a NaN, or the worker died or
                hung.
        """
        timeout = self._timeout_now
        self._timeout_now = self._timeout
        if not self._connection.poll(timeout):
            raise EnvironmentFaultError(
                f"the worker of {self._all_names()} did not respond for {timeout:g} s (timeout)"
                f" {self._where()}"
            )
        try:
            with self._within_timeout():
                message = self._connection.recv_bytes()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_TIMEOUT)
            raise EnvironmentFaultError(
                f"the worker of {self._all_names()} died (exit code {self._process.returncode})"
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
        """Kill a worker that hangs while receiving a message larger than the pipe's buffer."""
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
        steps = self._arrays["episode_step"]
        for row, name in enumerate(self._names, self._first):
            if self._arrays["active"][row]:
                return f"in task {name!r}, step {steps[row]} of its episode"
        return (
            "between two steps,"
            f" after step {steps[self._first]} of the episode of {self._names[0]!r}"
        )

    def disconnect(self) -> None:
        """Close the connection, upon which the worker exits, without waiting for it."""
        self._connection.close()

    def close(self) -> None:
        """Shut down the worker."""
        self._finalizer()

    def kill(self) -> None:
        """Kill the worker without closing its environments."""
        self._process.kill()
        self._finalizer()


def close_together(groups: Sequence[LocalGroup | WorkerGroup]) -> None:
    """Close groups, disconnecting all workers before waiting for the first."""
    for group in groups:
        if isinstance(group, WorkerGroup):
            group.disconnect()
    for group in groups:
        group.close()


def _end(connection: Any, process: subprocess.Popen[bytes]) -> None:
    """Close the connection, upon which the worker exits, or kill it if it does not."""
    connection.close()
    try:
        process.wait(CLOSE_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
