"""Forked processes, and which processes still run."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

FORK = multiprocessing.get_context("fork")


def fork(function: Callable[[int], Any], number: int) -> list[BaseProcess]:
    """Call a function with 0, 1, ... in as many copies of this process.

    To start an interpreter and to import PyTorch and Lightning takes five seconds.
    """
    made = [FORK.Process(target=function, args=(rank,), daemon=True) for rank in range(number)]
    for process in made:
        process.start()
    return list(made)


def exit_codes(processes: Iterable[BaseProcess], seconds: float = 300.0) -> list[int | None]:
    """Return the exit codes of processes; None for one that still runs after some seconds."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(end - time.monotonic(), 0.0))
    return [process.exitcode for process in processes]


def alive(pids: Iterable[int]) -> set[int]:
    """Return those that still run; a zombie that nobody has reaped has ended."""
    running = {
        process.pid
        for process in psutil.process_iter(["status"])
        if process.info["status"] != "zombie"
    }
    return running & set(pids)


def wait_until_gone(pids: Iterable[int], seconds: float = 10.0) -> None:
    """Wait until none of them runs; fail after some seconds."""
    deadline = time.monotonic() + seconds
    while alive(pids):
        assert time.monotonic() < deadline, f"{alive(pids)} still run"
        time.sleep(0.05)
