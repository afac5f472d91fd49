"""Faults after which a resumed run equals the uninterrupted one: kills, signals, a full disk."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psutil

from benchmarks.bench import Bench, Row
from benchmarks.trial import Session, Trial
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.run.checkpoint_file import load_newest_whole

DISK_BYTES = 16 * 2**20
FILE_BYTES = 60_000
"""A limit of a file's size that metrics fit in, and neither checkpoints nor chunks do."""


def kill_row(bench: Bench, row: Row) -> None:
    """Kill the main process while it starts, steps and saves; continue each time."""
    draws = bench.draws(row.name)
    trial = bench.trial(row.name)
    number = bench.counts["kills"]
    starts = -(-number // 6)
    steps = number // 3
    moments = ["start"] * starts + ["step"] * steps + ["save"] * (number - starts - steps)
    draws.shuffle(moments)
    at_save = 0
    slowest = 0.0
    for k, moment in enumerate(moments):
        session = trial.start()
        target = drawn_target(bench, trial, draws, k, number)
        if not await_moment(trial, session, moment, target, draws):
            session.expect_end(0)
            row.expect(False, f"the run ended before kill {k + 1} of {number}")
            break
        session.kill()
        row.survived = row.survived if moment == "start" else row.injected
        row.injected += 1
        hit = bool(trial.unfinished(session.start_time))
        at_save += hit
        slowest = max(slowest, bench.judge_remains(row, session))
        bench.say(
            f"kill {k + 1} of {number}:"
            f" {moment}, {trial.env_steps()} env steps seen{', within a save' if hit else ''}"
        )
    bench.judge_remains(row, trial.finish())
    row.survived = row.injected
    bench.judge_exact(row, trial)
    counted = ", ".join(
        f"{moments.count(moment)} meant for {moment}" for moment in ("start", "step", "save")
    )
    row.checks.append(
        f"{counted}; {at_save} left an unfinished file;"
        f" workers and memory gone after {slowest:.1f} s"
    )


def drawn_target(bench: Bench, trial: Trial, draws: random.Random, k: int, number: int) -> float:
    """Draw the environment steps of fault ``k`` from its share of the run, without the end.

    They are not before the last checkpoint, from which the run continues.
    """
    point = (k + draws.random()) / number * 0.93 * bench.total_steps
    return max(point, trial.saved_steps() + draws.uniform(0, 0.04) * bench.total_steps)


def await_moment(
    trial: Trial, session: Session, moment: str, target: float, draws: random.Random
) -> bool:
    """Wait for a moment; return whether the process still lives."""
    if moment == "start":
        end = time.monotonic() + draws.uniform(0.1, 9.0)
        session.wait_until(lambda: time.monotonic() > end or trial.stepping(session))
        return session.running
    session.wait_until(lambda: trial.stepping(session) and trial.env_steps() >= target)
    if moment == "step":
        time.sleep(draws.uniform(0.0, 0.4))
    else:
        delay = draws.choice([0.0, 0.0, draws.uniform(0.0, 0.005)])
        folder = trial.folder
        session.wait_until(lambda: bool(trial.unfinished(session.start_time, folder)), interval=0.0)
        if delay:
            time.sleep(delay)
    return session.running


def signal_row(bench: Bench, row: Row) -> None:
    """Ask the main process to end, by SIGTERM and by SIGINT in turn; continue each time."""
    draws = bench.draws(row.name)
    trial = bench.trial(row.name)
    number = bench.counts["signals"]
    for k in range(number):
        asked = (signal.SIGTERM, signal.SIGINT)[k % 2]
        session = trial.start()
        target = drawn_target(bench, trial, draws, k, number)
        if not await_moment(trial, session, "step", target, draws):
            row.expect(False, f"the run ended before signal {k + 1} of {number}")
            break
        session.kill(asked)
        row.injected += 1
        session.expect_end(128 + asked, 60)
        row.expect(
            "continue with mtrl-lightning fit --resume" in session.text(),
            "an interrupted run does not say how to continue",
        )
        row.expect("Traceback" not in session.text(), "an interrupted run printed a traceback")
        bench.judge_remains(row, session)
        row.survived += 1
        bench.say(
            f"signal {k + 1} of {number}: {asked.name}, saved after {trial.saved_steps()} env steps"
        )
    trial.finish()
    bench.judge_exact(row, trial)
    row.checks.append("exit codes 143 and 130")


class Room(Protocol):
    """What can be taken from a run and given back."""

    def take(self, session: Session) -> None:
        """Let the next save fail."""

    def give(self, session: Session) -> None:
        """Let saves succeed again."""


class SmallDisk:
    """A small file system that is filled up.

    Args:
        folder: where it is mounted.
    """

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def take(self, session: Session) -> None:
        """Write until nothing more fits."""
        with contextlib.suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def give(self, session: Session) -> None:
        """Delete what was written."""
        self._filler.unlink(missing_ok=True)


class SmallFiles:
    """A limit of the size of a process' files, where no file system can be mounted."""

    def take(self, session: Session) -> None:
        """Set the limit."""
        _limit_files(session, FILE_BYTES)

    def give(self, session: Session) -> None:
        """Take it back."""
        _limit_files(session, resource.RLIM_INFINITY)


def _limit_files(session: Session, size: int) -> None:
    if session.running:
        process = psutil.Process(session.process.pid)
        process.rlimit(psutil.RLIMIT_FSIZE, (size, process.rlimit(psutil.RLIMIT_FSIZE)[1]))


@contextlib.contextmanager
def small_room(root: Path) -> Iterator[Room]:
    """Mount a small file system, or take a limit of files' sizes where that is not allowed."""
    root.mkdir(parents=True)
    mounted = False
    if sys.platform == "linux" and os.geteuid() == 0:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(root)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(root) if mounted else SmallFiles()
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(root)], check=False)


def disk_row(bench: Bench, row: Row) -> None:
    """Fill the disk while a run saves, once with each ``on_error``; free it, and continue."""
    draws = bench.draws(row.name)
    for rule in ("continue", "stop"):
        root = bench.folder / f"disk-{rule}" / "runs"
        config = bench.config(checkpoint={"on_error": rule})
        with small_room(root) as room:
            trial = bench.trial(f"disk-{rule}", config, root)
            session = trial.start()
            target = draws.uniform(0.3, 0.6) * bench.total_steps
            assert session.wait_until(
                lambda: trial.stepping(session) and trial.env_steps() >= target  # noqa: B023
            )
            row.injected += 1
            _full(row, trial, session, room, rule)
            if rule == "stop":
                trial.finish()
            bench.judge_exact(row, trial)
            row.survived += 1
            bench.say(f"disk, on_error {rule}: survived a full {type(room).__name__}")
            trial.close()
    row.checks.append(
        f"by {type(room).__name__}; the former checkpoint was whole while nothing could be written"
    )


def _full(row: Row, trial: Trial, session: Session, room: Room, rule: str) -> None:
    if rule == "continue":
        said = "the former ones are kept and the run continues"
    else:
        said = "free the disk, then continue from"

    def failed() -> bool:
        room.take(session)
        return said in session.text()

    if not session.wait_until(failed):
        raise session.error("ended and did not say that it could not save")
    last = trial.folder / "checkpoints" / "last.ckpt"
    if rule == "stop":
        session.expect_end(2)
    path, _ = load_newest_whole(last, with_replay=True)
    row.expect(
        path == last, f"the former checkpoint is not whole: {path} was read in place of {last}"
    )
    before = load_checkpoint(last)["mtrl_lightning"]["counters"]["env_steps"]
    room.give(session)
    if rule == "continue":
        session.expect_end(0)
        after = load_checkpoint(last)["mtrl_lightning"]["counters"]["env_steps"]
        row.expect(after > before, "nothing was saved when there was room again")
        row.checks.append(
            f"on_error continue: {session.text().count(said)} save(s) failed, then saved again"
        )
