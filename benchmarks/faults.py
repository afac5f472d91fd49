"""Which faults a run survives: kills, signals, hangs, broken environments, damaged files.

A small MetaWorld run goes through the real command line, uninterrupted once, and then with faults
at random moments. With --ranks 2 it is a run of two processes on the toy benchmark. The table has
the faults that were injected and survived, the transitions that were lost (happened and not stored)
or false (stored and never happened), and whether the end equals that of the uninterrupted run, bit
for bit. The exit code is 1 if a row fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from benchmarks.fault_runs import (
    HORIZON,
    TOTAL_STEPS,
    TOY_TASKS,
    Chain,
    FaultRun,
    Outcome,
    Rows,
    Session,
    check_chain,
    check_toy_chain,
    compare_rows,
    differences,
    is_alive,
    read_outcome,
    small_run,
    toy_run,
)
from benchmarks.measuring import end_on_sigterm, heading, parse, parser_of, positive, publish, say
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.formats import UNKNOWN, text_table
from mtrl_lightning.run.checkpoint_file import load_newest_whole
from mtrl_lightning.run.data import manifest_of

WORKER_TIMEOUT = 20.0
"""Seconds after which a stopped worker counts as hung; rebuilding an environment must take less."""
RANK_TIMEOUT = 30.0
"""Seconds after which a process that is stopped counts as lost."""
END_SECONDS = 120.0
"""Within this time all processes of a run have ended when one is killed, on busy cores."""
ALLOWED_RESTARTS = 2
"""Of the row whose environments break more often."""
ON_ERROR = {
    "continue": "the previous ones are kept and the run continues",
    "stop": "free the disk, then continue from",
}
"""Values of ``checkpoint.on_error``, and the message of a save that fails."""
FILE_BYTES = 60_000
"""A limit of a file's size that metrics fit in, and neither checkpoints nor chunks do."""
HARMS = ("flip", "truncate", "zero", "missing", "insert", "text", "code", "tensor")
"""Of files: bytes in a random place, or other content."""


@dataclass
class Row:
    """The result of one kind of fault."""

    name: str
    """The row's name on the command line."""
    injected: int = 0
    """Faults that were injected."""
    survived: int = 0
    """Faults after which the run continued, or was continued, as it must."""
    lost: int | None = None
    """Transitions that happened and are not in the replay; None where it does not apply."""
    false: int | None = None
    """Transitions in the replay that never happened."""
    exact: bool | None = None
    """Whether the end is bit-exact; None where the fault prevents it."""
    checks: list[str] = field(default_factory=list)
    """Further observations."""
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def expect(self, condition: bool, failure: str) -> None:
        """Note a failure unless a condition holds."""
        if not condition:
            self.failures.append(failure)

    @property
    def ok(self) -> bool:
        """Whether faults were injected and all went as it must."""
        counts_right = 0 < self.injected == self.survived and not self.lost and not self.false
        return counts_right and self.exact is not False and not self.failures


class Bench:
    """A folder for runs, named random numbers, and the uninterrupted run.

    Args:
        folder: of all runs.
        seed: of the runs and of all faults.
        counts: faults of each row.
        total_steps: environment steps of a run.
        ranks: processes of a run; with several, it is one of ``ToyReach``.
    """

    def __init__(
        self, folder: Path, seed: int, counts: dict[str, int], total_steps: int, ranks: int
    ) -> None:
        self.folder = folder
        self.seed = seed
        self.counts = counts
        self.total_steps = total_steps
        self.ranks = ranks
        self._runs: list[FaultRun] = []

    def generator(self, name: str) -> random.Random:
        """Return the generator of a row."""
        return random.Random(f"{self.seed} {name}")

    def config(self, **sections: dict[str, Any]) -> dict[str, Any]:
        """Return the small run's configuration with changes, by section."""
        if self.ranks > 1:
            config = toy_run(self.seed, self.total_steps, self.ranks)
        else:
            config = copy.deepcopy(small_run(self.seed, self.total_steps))
        for name, changes in sections.items():
            config[name] |= changes
        return config

    def run(
        self, name: str, config: dict[str, Any] | None = None, root: Path | None = None
    ) -> FaultRun:
        """Return a run that is not started yet."""
        logs = self.folder / name
        config = self.config() if config is None else config
        self._runs.append(FaultRun(root or logs / "runs", config, logs))
        return self._runs[-1]

    @cached_property
    def uninterrupted(self) -> FaultRun:
        """The run without any fault."""
        say("the uninterrupted run")
        run = self.run("uninterrupted")
        run.finish()
        return run

    @cached_property
    def expected(self) -> Outcome:
        """The outcome of the uninterrupted run; its own transitions are true.

        Raises:
            AssertionError: if they are not, because then the check itself is wrong.
        """
        outcome = read_outcome(self.uninterrupted)
        for index, rows in enumerate(outcome.rings):
            chain = self.chain_of(index, rows, from_beginning=False)
            assert not any(chain), f"transitions of the uninterrupted run are wrong: {chain}"
        return outcome

    def chain_of(self, index: int, rows: Rows, from_beginning: bool = True) -> Chain:
        """Check the rows of an environment."""
        if self.ranks > 1:
            return check_toy_chain(rows, index % TOY_TASKS, from_beginning)
        return check_chain(rows, HORIZON, from_beginning)

    def judge_exact(self, row: Row, run: FaultRun) -> None:
        """Compare a run's end with that of the uninterrupted run."""
        found = read_outcome(run)
        parts = [
            part
            for name, a in self.expected._asdict().items()
            for part in differences(a, getattr(found, name), name)
        ]
        lost, false = compare_rows(self.expected.rings, found.rings)
        row.lost = (row.lost or 0) + lost
        row.false = (row.false or 0) + false
        row.exact = row.exact is not False and not parts
        row.expect(not parts, f"differs in {len(parts)} places: {', '.join(parts[:4])}")
        env_steps = found.counters["env_steps"]
        row.expect(env_steps == self.total_steps, f"ended after {env_steps} steps")
        row.expect(not run.unfinished(), f"unfinished files are left: {run.unfinished()}")

    def judge_remains(self, row: Row, session: Session, seconds: float = 20.0) -> None:
        """Check that nothing of an ended process is left."""
        left, waited = session.remains(seconds)
        row.expect(not left, f"left after {waited:.0f} s: {left}")

    def judge_rows(self, row: Row, run: FaultRun, ends: int = 0) -> None:
        """Check that all rows happened and none is missing, and count the survived faults.

        Each fault costs at most one step of each environment of a worker, and one more where the
        run ended with it.

        Args:
            row: to write to.
            run: that has ended.
            ends: times that a fault ended the run.
        """
        outcome = read_outcome(run)
        counters = outcome.counters
        chains = [self.chain_of(index, rows) for index, rows in enumerate(outcome.rings)]
        stored = sum(len(rows["reward"]) for rows in outcome.rings)
        dropped = counters["dropped_transitions"]
        restarts = counters["worker_restarts"]
        happened = counters["vector_steps"] * len(chains) - dropped
        broken = sum(chain.cut + chain.torn for chain in chains)
        most = row.injected * (TOY_TASKS if self.ranks > 1 else 1)
        row.false = sum(chain.false for chain in chains)
        row.lost = abs(happened - stored) + abs(counters["env_steps"] - stored)
        row.lost += max(0, broken - most)
        row.survived = min(row.injected, restarts + ends)
        row.expect(restarts + ends >= row.injected, f"{restarts} restarts, {row.injected} faults")
        row.expect(ends > 0 or restarts == row.injected, f"{restarts} restarts are counted")
        row.expect(counters["env_steps"] >= self.total_steps, "ended too early")
        row.expect(not any(chain.overlong for chain in chains), "an episode did not end in time")
        row.expect(
            broken <= dropped <= most + ends,
            f"{broken} episodes broken, {dropped} transitions dropped, {row.injected} faults",
        )
        logged = outcome.metrics[-1]
        # a worker that dies while the last checkpoint is written is counted there alone
        row.expect(
            int(logged["fault/worker_restarts"] or -1) in (restarts, restarts - 1)
            and int(logged["fault/dropped_transitions"] or -1) == dropped,
            f"metrics.csv has other counts than {restarts} restarts and {dropped} dropped steps",
        )
        row.checks.append(
            f"{restarts} restarts, {dropped} steps dropped, {broken} episodes broken,"
            f" {stored} rows stored"
        )

    def close(self) -> None:
        """End every process that is left."""
        for run in self._runs:
            run.close()


# ---- interruptions, after which the run is continued to the same end ----


def sampled_target(
    bench: Bench, run: FaultRun, generator: random.Random, k: int, number: int
) -> float:
    """Sample the environment steps of fault ``k`` from its share of the run, without the end.

    They are not before the last checkpoint, from which the run continues.
    """
    point = (k + generator.random()) / number * 0.93 * bench.total_steps
    return max(point, run.saved_steps() + generator.uniform(0, 0.04) * bench.total_steps)


def await_moment(
    run: FaultRun, session: Session, moment: str, target: float, generator: random.Random
) -> bool:
    """Wait for a moment of a run; return whether it still lives.

    Args:
        run: the run.
        session: its process.
        moment: ``start``, ``step`` or ``save``.
        target: environment steps from which on a fault comes while it steps or saves.
        generator: of the exact moment.
    """
    if moment == "start":
        end = time.monotonic() + generator.uniform(0.1, 9.0)
        session.wait_until(lambda: time.monotonic() > end or run.is_stepping(session))
        return session.is_running
    session.wait_until(lambda: run.is_stepping(session) and run.env_steps() >= target)
    if moment == "step":
        time.sleep(generator.uniform(0.0, 0.4))
    else:
        delay = generator.choice([0.0, 0.0, generator.uniform(0.0, 0.005)])
        folder = run.folder
        session.wait_until(lambda: bool(run.unfinished(session.start_time, folder)), interval=0.0)
        time.sleep(delay)
    return session.is_running


def interrupt(
    bench: Bench,
    row: Row,
    moments: Sequence[str],
    strike: Callable[[Session, psutil.Process, int], None],
    **sections: dict[str, Any],
) -> None:
    """Interrupt a run at moments, continue each time, and compare the end.

    Args:
        bench: the bench.
        row: to write to.
        moments: see ``await_moment``.
        strike: injects the fault into a process, the main one or that of a rank in turn, and checks
            how the run ends; it gets the number of the fault.
        **sections: changes of the configuration.
    """
    generator = bench.generator(row.name)
    run = bench.run(row.name, bench.config(**sections))
    hits = 0
    for k, moment in enumerate(moments):
        session = run.start()
        target = sampled_target(bench, run, generator, k, len(moments))
        rank = k % bench.ranks
        if bench.ranks > 1 and moment == "start":
            session.wait_until(lambda: rank in session.ranks())  # noqa: B023
        is_there = await_moment(run, session, moment, target, generator)
        process = session.ranks().get(rank) if is_there else None
        if process is None:
            session.expect_end(0)
            row.expect(False, f"the run ended before fault {k + 1} of {len(moments)}")
            break
        row.injected += 1
        strike(session, process, k)
        hits += bool(run.unfinished(session.start_time))
        row.survived += 1
        seen = run.env_steps()
        say(f"{row.name} {k + 1} of {len(moments)}: {moment}, {seen} env steps seen")
    bench.judge_remains(row, run.finish())
    bench.judge_exact(row, run)
    counts = ", ".join(f"{number} meant for {name}" for name, number in Counter(moments).items())
    row.checks.append(f"{counts}; {hits} left an unfinished file")


def kill_row(bench: Bench, row: Row) -> None:
    """Kill the main process, or each rank in turn, while the run starts, steps and saves."""
    number = bench.counts[row.name]
    starts = -(-number // 6)
    steps = number // 3
    moments = ["start"] * starts + ["step"] * steps + ["save"] * (number - starts - steps)
    bench.generator(f"{row.name} moments").shuffle(moments)

    def strike(session: Session, process: psutil.Process, k: int) -> None:
        process.kill()
        if bench.ranks > 1:
            expect_loss(bench, row, session, k % bench.ranks, moments[k])
        else:
            session.process.wait()
            bench.judge_remains(row, session)

    interrupt(bench, row, moments, strike)


def signal_row(bench: Bench, row: Row) -> None:
    """Ask the main process to end, by SIGTERM and by SIGINT in turn."""

    def strike(session: Session, process: psutil.Process, k: int) -> None:
        asked = (signal.SIGTERM, signal.SIGINT)[k % 2]
        session.kill(asked)
        session.expect_end(128 + asked, 60)
        hint = "continue with mtrl-lightning fit --resume"
        row.expect(hint in session.text(), "an interrupted run does not say how to continue")
        row.expect("Traceback" not in session.text(), "an interrupted run printed a traceback")
        bench.judge_remains(row, session)

    interrupt(bench, row, ["step"] * bench.counts[row.name], strike)
    row.checks.append("exit codes 143 and 130")


def rank_hang_row(bench: Bench, row: Row) -> None:
    """Stop ranks so that they hang; the others end the run in time."""

    def strike(session: Session, process: psutil.Process, k: int) -> None:
        process.send_signal(signal.SIGSTOP)
        expect_loss(bench, row, session, k % bench.ranks, "hang")

    timeouts = {"timeout": RANK_TIMEOUT - 5, "rank_timeout": RANK_TIMEOUT}
    interrupt(bench, row, ["step"] * bench.counts[row.name], strike, rollout=timeouts)
    row.checks.append(f"rollout.rank_timeout {RANK_TIMEOUT:g} s")


def expect_loss(bench: Bench, row: Row, session: Session, rank: int, moment: str) -> None:
    """Check that all processes end, with an error that names the one that was lost."""
    start = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        session.process.wait(END_SECONDS)
    code = session.process.poll()
    row.expect(code not in (None, 0), f"the run ended with {code} when rank {rank} was lost")
    bench.judge_remains(row, session, END_SECONDS)
    text = f"rank {rank} has {'not answered' if moment == 'hang' else ''}"
    if moment != "start":  # where the processes may not be connected yet
        row.expect(text in session.text(), f"no message {text!r}: {session.text()[-500:]}")
    say(f"all processes had ended {time.monotonic() - start:.1f} s after the loss of rank {rank}")


def rank_restart_row(bench: Bench, row: Row) -> None:
    """Kill ranks of a run that ``torchrun --max-restarts`` starts again itself."""
    generator = bench.generator(row.name)
    run = bench.run(row.name)
    number = bench.counts[row.name]
    # a rank that lost another one may be noticed as a failure of its own after the restart
    session = run.start_with_torchrun(bench.ranks, 3 * number)
    for k in range(number):
        target = sampled_target(bench, run, generator, k, number)
        session.wait_until(lambda: run.env_steps() >= target)  # noqa: B023
        process = session.ranks().get(generator.randrange(bench.ranks))
        if process is None:
            row.expect(False, f"the run ended before fault {k + 1} of {number}")
            break
        process.kill()
        row.injected += 1
        session.wait_until(lambda: process not in session.ranks().values())  # noqa: B023
    session.expect_end(0)
    row.survived = row.injected
    bench.judge_remains(row, session)
    bench.judge_exact(row, run)
    row.checks.append("one command of torchrun, which ended with 0")


# ---- broken environments, after which the run continues without a false transition ----


def broken_config(bench: Bench, **rollout: Any) -> dict[str, Any]:
    """Return a configuration whose replay holds all transitions."""
    return bench.config(data={"capacity": 2 * bench.total_steps}, rollout=rollout)


def worker_row(bench: Bench, row: Row, sent: int = signal.SIGKILL) -> None:
    """Kill workers at random moments of one run, which continues in the same processes."""
    number = bench.counts[row.name]
    generator = bench.generator(row.name)
    options: dict[str, Any] = {"max_restarts": 10_000}
    if sent == signal.SIGSTOP:
        options["timeout"] = WORKER_TIMEOUT
    run = bench.run(row.name, broken_config(bench, **options))
    session = run.start()
    first: dict[int, psutil.Process] = {}
    for k in range(number):
        target = (k + generator.random()) / number * 0.9 * bench.total_steps
        session.wait_until(
            lambda: run.is_stepping(session) and run.env_steps() >= target  # noqa: B023
        )
        time.sleep(generator.uniform(0.0, 0.5))
        rank = generator.randrange(bench.ranks)
        session.wait_until(lambda: have_workers(bench, session))
        if not session.is_running:
            row.expect(False, f"the run ended before fault {k + 1} of {number}")
            break
        ranks = session.ranks()
        workers = {other: session.workers(process) for other, process in ranks.items()}
        first = first or ranks
        row.expect(first == ranks, "a process of the run was started again")
        victim = generator.choice(workers[rank])
        victim.send_signal(sent)
        row.injected += 1
        session.wait_until(lambda: not is_alive(victim))  # noqa: B023
        for other in ranks.keys() - {rank}:
            is_kept = set(session.workers(ranks[other])) == set(workers[other])
            row.expect(is_kept, f"a worker of rank {other} was started again")
        say(f"{row.name} {k + 1} of {number}: rank {rank}, {run.env_steps()} env steps seen")
    session.expect_end(0)
    bench.judge_remains(row, session)
    bench.judge_rows(row, run)


def have_workers(bench: Bench, session: Session) -> bool:
    """Return whether all processes of a run have all of their workers, none being rebuilt."""
    number = bench.config()["rollout"]["num_workers"]
    ranks = session.ranks().values()
    return len(ranks) == bench.ranks and all(len(session.workers(one)) == number for one in ranks)


def faulty(config: dict[str, Any], ledger: Path, limit: int, within: int) -> dict[str, Any]:
    """Return a configuration whose environments break; see ``FaultyMetaWorld``."""
    benchmark = config["data"]["benchmark"]
    benchmark["class_path"] = "benchmarks.environments.FaultyMetaWorld"
    benchmark["init_args"] |= {"ledger": str(ledger), "limit": limit, "within": within}
    return config


def nan_row(bench: Bench, row: Row) -> None:
    """Let environments return NaNs and infinite rewards, and raise, at random steps of one run."""
    number = bench.counts[row.name]
    ledger = bench.folder / row.name / "ledger"
    # two environments, whose faults are half of `within` apart in the mean, for half of the env
    # steps each: twice the faults would come, so that the limit is reached before the end
    within = max(2, bench.total_steps // max(number, 1))
    config = faulty(broken_config(bench, max_restarts=10_000), ledger, number, within)
    run = bench.run(row.name, config)
    bench.judge_remains(row, run.finish())
    row.injected = len(list(ledger.glob("*")))
    bench.judge_rows(row, run)
    kinds = Counter(path.read_text().split()[1] for path in sorted(ledger.glob("*")))
    row.checks.append(", ".join(f"{count} {kind}" for kind, count in kinds.items()))


def exhausted_row(bench: Bench, row: Row) -> None:
    """Let environments break more often than they may be rebuilt; continue until the run's end."""
    ledger = bench.folder / row.name / "ledger"
    limit = bench.counts[row.name]
    config = broken_config(bench, max_restarts=ALLOWED_RESTARTS)
    run = bench.run(row.name, faulty(config, ledger, limit, bench.total_steps // (2 * limit)))
    ends = 0
    while True:
        before = run.saved_steps()
        session = run.start()
        session.process.wait(600)
        bench.judge_remains(row, session)
        if session.process.returncode == 0:
            break
        session.expect_end(1)
        ends += 1
        text = session.text()[session.text().rfind("error: ") :]
        for part in ("task '", "step ", "restarts, the most allowed"):
            row.expect(part in text, f"the message does not name {part!r}: {text[-300:]}")
        causes = ("not finite", "reward is", "RuntimeError")
        row.expect(any(cause in text for cause in causes), f"no cause: {text}")
        row.expect(run.saved_steps() > before, "no checkpoint was saved at the end")
        if ends > limit:
            raise session.error("does not come to its end")
    row.injected = len(list(ledger.glob("*")))
    bench.judge_rows(row, run, ends)
    row.expect(ends >= 1, "the restarts were never used up")
    row.checks.append(f"ended {ends} time(s) with code 1, a message and a checkpoint")


# ---- a full disk ----


def disk_row(bench: Bench, row: Row) -> None:
    """Let saves fail, as on a full disk, once with each ``on_error``; then allow them again.

    A limit of the size of the process' files stands for the full disk: it needs no rights.
    """
    generator = bench.generator(row.name)
    for rule, message in ON_ERROR.items():
        run = bench.run(f"disk-{rule}", bench.config(checkpoint={"on_error": rule}))
        session = run.start()
        target = generator.uniform(0.3, 0.6) * bench.total_steps
        session.wait_until(
            lambda: run.is_stepping(session) and run.env_steps() >= target  # noqa: B023
        )
        row.injected += 1
        limit_files(session, FILE_BYTES)
        if not session.wait_until(lambda: message in session.text()):  # noqa: B023
            raise session.error("ended and did not say that it could not save")
        if rule == "stop":
            session.expect_end(2)
        path, last = load_newest_whole(run.last, with_replay=True)
        row.expect(path == run.last, f"{path} was read in place of {run.last}, which is damaged")
        if rule == "stop":
            run.finish()
        else:
            limit_files(session, resource.RLIM_INFINITY)
            session.expect_end(0)
            before, after = (
                checkpoint["mtrl_lightning"]["counters"]["env_steps"]
                for checkpoint in (last, load_checkpoint(run.last))
            )
            row.expect(after > before, "nothing was saved when it was possible again")
        bench.judge_exact(row, run)
        row.survived += 1
        say(f"disk, on_error {rule}: survived")
    row.checks.append("the last checkpoint was whole while nothing could be written")


def limit_files(session: Session, size: int) -> None:
    """Limit the size of the files that the main process writes."""
    if session.is_running:
        process = psutil.Process(session.process.pid)
        process.rlimit(psutil.RLIMIT_FSIZE, (size, process.rlimit(psutil.RLIMIT_FSIZE)[1]))


# ---- damaged files ----


class _Code:
    """A value that would make a folder if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def damaged(
    content: bytes, harm: str, generator: random.Random, marker: Path = Path("executed")
) -> bytes:
    """Return the damaged content of a file.

    Args:
        content: of the file.
        harm: one of ``HARMS``.
        generator: of the place.
        marker: folder that appears if code in the file is executed.
    """
    place = generator.randrange(len(content))
    if harm == "flip":
        flipped = content[place] ^ 1 << generator.randrange(8)
        return content[:place] + bytes([flipped]) + content[place + 1 :]
    if harm == "zero":
        block = min(512, len(content) - place)
        return content[:place] + bytes(block) + content[place + block :]
    if harm == "truncate":
        return content[:place]
    if harm == "insert":
        return content[:place] + generator.randbytes(16) + content[place:]
    if harm == "text":
        return b"a list of groceries\n" * 50
    buffer = io.BytesIO()
    torch.save(_Code(marker) if harm == "code" else torch.zeros(3), buffer)
    return buffer.getvalue()


def corruption_row(bench: Bench, row: Row) -> None:
    """Damage the last checkpoint, or its newest replay file, and continue on the command line."""
    generator = bench.generator(row.name)
    verdicts: Counter[str] = Counter()
    for k in range(bench.counts[row.name]):
        harm = HARMS[k // 2 % len(HARMS)]
        run = bench.run(f"corruption-{k}")
        folder = run.root / "run" / "version_0"
        folder.parent.mkdir(parents=True)
        # with the names that are links to the same file
        subprocess.run(["cp", "-a", bench.uninterrupted.folder, folder], check=True)
        path = run.last
        if k % 2:
            newest = manifest_of(load_checkpoint(path))["chunks"][-1]["file"]
            path = folder / "replay" / newest
        marker = bench.folder / f"executed-{k}"
        if harm == "missing":
            path.unlink()
        else:
            path.write_bytes(damaged(path.read_bytes(), harm, generator, marker))
        row.injected += 1
        session = run.start("--ckpt_path=last")
        session.expect_end(0)
        is_loud = "GOING BACK" in session.text() and path.name in session.text()
        row.expect(is_loud or harm == "flip", f"{path.name}, {harm}: does not say it goes back")
        row.expect(not marker.exists(), f"{path.name}: code in it was executed")
        bench.judge_exact(row, run)
        row.survived += 1
        verdicts["went back" if is_loud else "unharmed"] += 1
        say(f"{row.name} {k + 1}: {path.name}, {harm}")
    row.checks.append(", ".join(f"{number} {name}" for name, number in verdicts.items()))


# ---- the table of faults ----


class Fault(NamedTuple):
    """A row of the table."""

    inject: Callable[[Bench, Row], None]
    number: int
    """Faults, unless ``--counts`` says otherwise."""
    is_compared: bool
    """Whether the end is compared with that of the uninterrupted run."""
    text: str


FAULTS = {
    "kill": Fault(kill_row, 20, True, "SIGKILL of the main process"),
    "signal": Fault(signal_row, 4, True, "SIGTERM and SIGINT"),
    "worker": Fault(worker_row, 20, False, "SIGKILL of a worker"),
    "hang": Fault(partial(worker_row, sent=signal.SIGSTOP), 2, False, "a worker that hangs"),
    "nan": Fault(nan_row, 6, False, "NaN, infinite reward, exception"),
    "exhausted": Fault(exhausted_row, 5, False, "more faults than max_restarts"),
    "disk": Fault(disk_row, 2, True, "a full disk"),
    "corruption": Fault(corruption_row, 16, True, "damaged checkpoints and replay files"),
}
RANK_FAULTS = {
    "kill": Fault(kill_row, 20, True, "SIGKILL of each process in turn"),
    "restart": Fault(rank_restart_row, 2, True, "SIGKILL of a process under torchrun"),
    "hang": Fault(rank_hang_row, 2, True, "SIGSTOP of each process"),
    "worker": Fault(worker_row, 6, False, "SIGKILL of a process' worker"),
}
"""Those of a run of several processes."""


def options_of(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("faults", __doc__, rounds=None)
    add = parser.add_argument
    names = dict.fromkeys([*FAULTS, *RANK_FAULTS])
    text = "rows of the table (default all; with --ranks: " + ", ".join(RANK_FAULTS) + ")"
    add("--rows", nargs="+", choices=list(names), metavar="ROW", help=f"{', '.join(names)}: {text}")
    text = "faults of a row, such as kill=2"
    add("--counts", nargs="+", default=[], metavar="ROW=NUMBER", help=text)
    text = "processes of a run; several train the toy benchmark (default %(default)s)"
    add("--ranks", type=positive, default=1, help=text)
    text = "of a run (default %(default)s)"
    add("--total_steps", type=positive, default=TOTAL_STEPS, help=text)
    text = "of the runs and of all faults (default %(default)s)"
    add("--seed", type=int, default=1, help=text)
    text = "of the runs, which are kept there; it must not exist yet (default a temporary one)"
    add("--folder", type=Path, help=text)
    return parse(parser, args, _check)


def _check(options: argparse.Namespace) -> None:
    if options.folder is not None and options.folder.exists():
        raise ConfigurationError(f"{options.folder} exists: give a folder that does not")
    offered = RANK_FAULTS if options.ranks > 1 else FAULTS
    options.rows = list(offered) if options.rows is None else options.rows
    counts = {name: fault.number for name, fault in offered.items()}
    for name in options.rows:
        if name not in offered:
            known = ", ".join(offered)
            raise ConfigurationError(f"{name}: with --ranks {options.ranks}, give {known}")
    for text in options.counts:
        name, _, number = text.partition("=")
        if name not in offered or not number.isdecimal():
            raise ConfigurationError(f"--counts {text}: takes ROW=NUMBER, as kill=2")
        counts[name] = int(number)
    options.counts = [f"{name}={counts[name]}" for name in options.rows]


def run_row(bench: Bench, name: str, fault: Fault) -> Row:
    """Run a row; an error is its failure."""
    start = time.monotonic()
    row = Row(name)
    try:
        fault.inject(bench, row)
    except Exception as error:  # one row's failure shall not hide the others
        row.failures.append(f"{type(error).__name__}: {error}")
    row.seconds = time.monotonic() - start
    say(f"{name}: {'ok' if row.ok else 'FAILED'} after {row.seconds:.0f} s")
    return row


def table(rows: Sequence[Row]) -> str:
    """Return the table as text, with the other checks and the failures of each row below it."""
    lines = [("fault", "injected", "survived", "lost", "false", "exact", "ok", "seconds")]
    for row in rows:
        exact = {None: UNKNOWN, True: "yes", False: "no"}[row.exact]
        lost, false = (UNKNOWN if count is None else str(count) for count in (row.lost, row.false))
        verdict = "ok" if row.ok else "FAILED"
        counts = (str(row.injected), str(row.survived), lost, false)
        lines.append((row.name, *counts, exact, verdict, f"{row.seconds:.0f}"))
    texts = [text_table(lines, num_texts=1)]
    for row in rows:
        texts += [f"{row.name}: {text}" for text in row.checks]
        texts += [f"{row.name}: FAILED: {text}" for text in row.failures]
    return "\n".join([*texts, "all rows are ok" if all_ok(rows) else "SOME ROWS FAILED"])


def all_ok(rows: Sequence[Row]) -> bool:
    """Return whether there are rows, and none failed."""
    return bool(rows) and all(row.ok for row in rows)


def main(args: Sequence[str] | None = None) -> int:
    """Run the rows and return the exit code."""
    end_on_sigterm()
    options = options_of(args)
    offered = RANK_FAULTS if options.ranks > 1 else FAULTS
    if options.folder is not None:
        options.folder.mkdir(parents=True)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="faults-")).resolve()
    counts = {name: int(number) for name, number in (pair.split("=") for pair in options.counts)}
    bench = Bench(folder, options.seed, counts, options.total_steps, options.ranks)
    try:
        if any(offered[name].is_compared for name in options.rows):
            _ = bench.expected
        rows = [run_row(bench, name, offered[name]) for name in options.rows]
    finally:
        bench.close()
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    found = [{**vars(row), "ok": row.ok} for row in rows]
    content = {**heading("faults", options), "ok": all_ok(rows), "rows": found}
    publish(content, table(rows), options.json)
    return 0 if all_ok(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
