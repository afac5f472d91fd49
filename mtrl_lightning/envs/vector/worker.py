"""The program of a worker process, which serves a group of environments to its parent.

Observations, actions and rewards are in shared memory, and a step takes one short message each way.
A worker is started as a separate program, without the parent's main module. It exits when the
parent closes the connection or has exited.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cloudpickle

from mtrl_lightning.envs.vector.env_group import EnvGroup, GroupPlan
from mtrl_lightning.envs.vector.shared_arrays import SharedMemory, arrays_in, num_bytes, open_memory
from mtrl_lightning.errors import CallError, ConfigurationError, EnvironmentFaultError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

SIGNALS = [
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
"""Signals that the main process handles, but terminals and clusters also send to workers."""
STEP = b"step"
"""The message that requests a step."""
DONE = b"done"
"""The message that a step has been made."""
BUSY_WAIT_SECONDS = 2e-4
"""How long a worker polls before it sleeps: waking up takes a tenth of a step of ten tasks."""
PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer);"
    " from mtrl_lightning.envs.vector.worker import main; main(int(sys.argv[1]))"
)
"""The program of a worker's interpreter, which uses the parent's module search path."""


def start_worker(
    name: str, plan: GroupPlan, memory: SharedMemory
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a worker process.

    Args:
        name: process name.
        plan: arguments of its group of environments.
        memory: memory of all groups' arrays.

    Returns:
        The process and its connection.
    """
    try:
        content = cloudpickle.dumps((plan, memory.handle))
    except Exception as error:
        raise ConfigurationError(
            f"the benchmark {type(plan.benchmark).__name__} cannot be sent to a worker process"
            f" ({type(error).__name__}: {error}): store only plain values and functions in it,"
            " and create everything else in make_env(); or set num_workers to 0"
        ) from error
    here, there = multiprocessing.Pipe()
    with there, _signals_blocked():
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(there.fileno()), name],
            stdin=subprocess.PIPE,
            **_inherited(there, memory),
        )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it died: the first answer reports that
        # The pipe stays open as long as this process, so that the worker notices its end.
        process.stdin.write(pickle.dumps([path for path in sys.path if isinstance(path, str)]))
        process.stdin.flush()
        here.send_bytes(content)
    return process, here  # type: ignore[return-value]


def _inherited(connection: Any, memory: SharedMemory) -> dict[str, Any]:
    """Return the options of ``Popen`` for a process to inherit a connection and memory."""
    if sys.platform == "win32":
        handle = connection.fileno()
        os.set_handle_inheritable(handle, True)
        startup = subprocess.STARTUPINFO(lpAttributeList={"handle_list": [handle]})
        return {"startupinfo": startup}
    return {"pass_fds": (connection.fileno(), memory.handle)}


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals while starting a process, because it cannot ignore them from the beginning."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


# ---- in the worker ----


def main(handle: int) -> None:
    """Serve a group of environments until the connection is closed or the parent exits.

    Args:
        handle: the inherited connection's file descriptor, or its handle on Windows.
    """
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    _end_with_parent()
    connection = _open_connection(handle)
    group: EnvGroup | None = None
    try:
        content = connection.recv_bytes()
        while True:
            _busy_wait(connection)
            message = connection.recv_bytes()
            try:
                if group is None:
                    group = _make_group(content)
                if message == STEP:
                    group.step()
                    connection.send_bytes(DONE)
                else:
                    method, args, kwargs = pickle.loads(message)
                    result = getattr(group, method)(*args, **kwargs)
                    connection.send_bytes(cloudpickle.dumps((result, None)))
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


def _open_connection(handle: int) -> Any:
    from multiprocessing import connection

    if sys.platform == "win32":
        return connection.PipeConnection(handle)
    return connection.Connection(handle)


def _make_group(content: bytes) -> EnvGroup:
    try:
        plan, handle = pickle.loads(content)
    except Exception as error:
        raise ConfigurationError(
            "a worker process cannot load the benchmark"
            f" ({type(error).__name__}: {error}):"
            " move its code to a module that can be imported,"
            " or set num_workers to 0"
        ) from error
    spec = plan.benchmark.spec
    buffer = open_memory(handle, num_bytes(plan.num_envs, spec))
    return EnvGroup(plan, arrays_in(buffer, plan.num_envs, spec))


def _busy_wait(connection: Connection) -> None:
    """Poll for a message for a short time, yielding the core to other processes."""
    yield_core = getattr(os, "sched_yield", lambda: time.sleep(0))  # not available on Windows
    end = time.perf_counter() + BUSY_WAIT_SECONDS
    while not connection.poll(0) and time.perf_counter() < end:
        yield_core()


def _end_with_parent() -> None:
    """Exit when the parent exits, even while an environment hangs in a step."""
    pipe = os.dup(0)  # environments and their subprocesses get an empty standard input
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    sys.stdin = open(os.devnull)  # noqa: SIM115

    def wait() -> None:
        os.read(pipe, 1)  # returns when the other end is closed in all processes
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
