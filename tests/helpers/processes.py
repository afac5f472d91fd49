"""Which processes still run."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil


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
