"""Start the other processes of a run on this machine, and end all when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.cores import usable_cores
from mtrl_lightning.errors import RankLostError

GRACE = 30.0
"""Seconds in which the first process may notice itself that another one is lost."""
PARENT_VARIABLE = "MTRL_LIGHTNING_FIRST_PROCESS"
"""Environment variable with the id of the process that has started this one for its run."""
END_SECONDS = 10.0
"""Seconds in which processes end by themselves when one is lost."""


class RankLauncher(_SubprocessScriptLauncher):
    """Start the command for each further process, as Lightning's launcher does.

    Lightning's own kills the first process within 5 s when another one has ended with an error,
    also while the first one saves the run or finishes a run of W&B. This one names the process that
    has ended. It ends the first process, with the exit code 1, only if that one is still training
    30 s later. A process that hangs is killed when the others have given it up.
    """

    _is_running = False

    def launch(
        self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Start the processes, and call a function.

        Raises:
            RankLostError: if a process is lost; the others have ended by then.
        """
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        parent = None
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT_VARIABLE] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[PARENT_VARIABLE]
            threading.Thread(target=self._watch, daemon=True, name="rank-watcher").start()
        elif os.environ.get(PARENT_VARIABLE) == str(os.getppid()):
            parent = os.getppid()
        if "OMP_NUM_THREADS" not in os.environ:
            num_threads = max(1, usable_cores() // self.num_processes)
            torch.set_num_threads(num_threads)
            os.environ["OMP_NUM_THREADS"] = str(num_threads)
        self._is_running = True
        try:
            return function(*args, **kwargs)
        except RankLostError as error:
            self._end_children()
            if parent is not None and error.is_silent and 0 in error.ranks:
                _kill_parent(parent)
            raise
        finally:
            self._is_running = False

    def _watch(self) -> None:
        """Name a process that has ended with an error; do not let the first one wait for it."""
        lost = None
        while lost is None:
            time.sleep(0.5)
            codes = [process.poll() for process in self.procs]
            if all(code == 0 for code in codes):
                return
            lost = next((rank for rank, code in enumerate(codes, 1) if code), None)
        process = self.procs[lost - 1]
        if not self._is_running:
            return
        rank_zero_warn(f"rank {lost} (process {process.pid}) has ended: {_ending(process)}")
        give_up_at = time.monotonic() + GRACE
        while self._is_running:
            if time.monotonic() > give_up_at:
                self.kill(signal.SIGKILL)
                _end(f"rank 0 was busy for {GRACE:g} s after rank {lost} had ended")
            time.sleep(0.5)

    def _end_children(self) -> None:
        give_up_at = time.monotonic() + END_SECONDS
        while any(process.poll() is None for process in self.procs):
            if time.monotonic() > give_up_at:
                self.kill(signal.SIGKILL)
                return
            time.sleep(0.1)


def end_with_first_process() -> None:
    """End this process if the one that has started it is gone before both are connected.

    It would wait for it for minutes. Once they are connected, the next exchange fails.
    """
    if PARENT_VARIABLE in os.environ:
        parent = int(os.environ[PARENT_VARIABLE])
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while not dist.is_initialized():
        if os.getppid() != parent:
            own_rank = os.environ.get("LOCAL_RANK")
            _end(f"rank 0 (process {parent}) has ended before rank {own_rank} was connected to it")
        time.sleep(0.5)


def _end(reason: str) -> None:
    """End this process from a thread of it, whatever the others do, as a fault of the run."""
    print(f"\nerror: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _ending(process: subprocess.Popen) -> str:
    code = process.returncode
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _kill_parent(parent: int) -> None:
    """Kill the first process, which hangs, if it is still there."""
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
