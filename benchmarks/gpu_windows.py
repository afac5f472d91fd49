"""Processes of ``benchmarks.gpu`` that take turns, and commands with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.entrants import Entrant
from benchmarks.gpu_setup import Setup
from benchmarks.gpu_sheet import Sheet
from benchmarks.measuring import (
    REPOSITORY,
    START_TIME,
    environment,
)

START_LIMIT = 150.0
"""Seconds to wait for a process' start-up, and for each of its windows."""
LAST_START = 0.7
"""Share of a part's time after which no further round is started."""
RESERVE = 30.0
"""Seconds at the end of a part's time in which it reads what a command has found."""
SKIPPED = "skipping cudagraphs"


@contextlib.contextmanager
def ready(entrants: Mapping[str, Entrant], sheet: Sheet) -> Iterator[dict[str, Entrant]]:
    """Start processes side by side, and end them; those that fail are noted and left out."""
    at_once = max(1, min(len(entrants), (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(at_once) as pool, contextlib.ExitStack() as stack:
        for entrant in entrants.values():  # ended before the pool, whose threads wait for them
            stack.callback(entrant.close)
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        starts = {name: pool.submit(entrant.start) for name, entrant in entrants.items()}
        able = {}
        for name, start in starts.items():
            error = start.exception()
            if error is None:
                able[name] = entrants[name]
            else:
                sheet.failure(entrants[name].name, str(error))
        yield able


def windows_of(
    entrants: Mapping[str, Entrant], setup: Setup, sheet: Sheet
) -> dict[str, list[float]]:
    """Return the seconds of windows in turn; a process that fails is noted and left out."""
    repeats = setup.sizes.repeats
    found: dict[str, list[float]] = {name: [] for name in entrants}
    for k in range(repeats):
        if k > 0 and time.monotonic() - START_TIME > LAST_START * setup.limit:
            sheet.note(f"{k} of {repeats} rounds: the time is over")
            break
        for name in list(found):
            try:
                found[name].append(entrants[name].window())
            except RuntimeError as error:
                sheet.failure(entrants[name].name, str(error))
                del found[name]
    return found


def printing_to(log: Path, command: Sequence[str], setup: Setup) -> int | None:
    """Run a command that prints to a file; return its exit code, None if its time was over."""
    limit = setup.limit - min(RESERVE, 0.3 * setup.limit)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the workers that it has started
            process.wait()
            output.write(f"\nended after {limit:.0f} s\n".encode())
            return None


def note_skipped(folder: Path, sheet: Sheet) -> None:
    """Note where PyTorch has compiled a function and left out its CUDA graph."""
    for log in sorted(folder.glob("*.log")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if SKIPPED in line]
        if lines:
            sheet.note(f"{log.stem}: {len(lines)} times {lines[0][-300:]}")
