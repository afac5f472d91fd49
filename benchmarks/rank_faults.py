"""Faults of runs of several processes ("ranks"): one is killed, hangs, or its environments break.

Lightning starts the processes; after a fault, the command is started again and continues from the
last checkpoint. In one row ``torchrun`` starts them, and starts them again itself.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time

import psutil

from benchmarks.bench import Bench, Row
from benchmarks.interruptions import await_moment, drawn_target
from benchmarks.judging import examine_toy, read_outcome
from benchmarks.trial import TOY_TASKS, Session, Trial

END_SECONDS = 120.0
"""Within this time, all processes of a run have ended when one is killed, on busy cores."""
HANG_TIMEOUT = 30.0
"""Seconds after which a process that is stopped counts as lost."""
WORKER_TIMEOUT = 25.0


def rank_kill_row(bench: Bench, row: Row) -> None:
    """Kill each rank in turn while the run starts, steps and saves; continue each time."""
    draws = bench.draws(row.name)
    trial = bench.trial(row.name)
    number = bench.counts["rank_kills"]
    starts = number // 5
    steps = (number - starts) // 2
    moments = ["start"] * starts + ["step"] * steps + ["save"] * (number - starts - steps)
    draws.shuffle(moments)
    hit = 0
    slowest = 0.0
    for k, moment in enumerate(moments):
        session = trial.start()
        target = drawn_target(bench, trial, draws, k, number)
        rank = k % bench.ranks
        process = _await_rank(trial, session, moment, target, draws, rank)
        if process is None:
            session.expect_end(0)
            row.expect(False, f"the run ended before kill {k + 1} of {number}")
            break
        process.kill()
        killed_at = time.monotonic()
        row.injected += 1
        hit += bool(trial.unfinished(session.start_time))
        _expect_loss(bench, row, session, rank, moment)
        slowest = max(slowest, time.monotonic() - killed_at)
        row.survived += 1
        bench.say(
            f"kill {k + 1} of {number}: rank {rank}, {moment}, {trial.env_steps()} env steps seen"
        )
    bench.judge_remains(row, trial.finish())
    bench.judge_exact(row, trial)
    counted = ", ".join(
        f"{moments.count(moment)} meant for {moment}" for moment in ("start", "step", "save")
    )
    row.checks.append(
        f"{counted}; {hit} left an unfinished file; all processes had ended after at most"
        f" {slowest:.1f} s"
    )


def rank_restart_row(bench: Bench, row: Row) -> None:
    """Kill ranks of a run that ``torchrun --max-restarts`` starts again itself."""
    draws = bench.draws(row.name)
    trial = bench.trial(row.name)
    number = bench.counts["rank_restarts"]
    # a rank that lost another one may be noticed as a failure of its own after the restart
    session = trial.start_with_torchrun(bench.ranks, 3 * number)
    for k in range(number):
        target = drawn_target(bench, trial, draws, k, number)
        session.wait_until(lambda: trial.env_steps() >= target)  # noqa: B023
        rank = draws.randrange(bench.ranks)
        process = session.ranks().get(rank)
        if process is None:
            row.expect(False, f"the run ended before kill {k + 1} of {number}")
            break
        process.kill()
        row.injected += 1
        bench.say(f"kill {k + 1} of {number} under torchrun: rank {rank}")
        session.wait_until(lambda: process.pid not in _pids(session))  # noqa: B023
    session.expect_end(0)
    row.survived = row.injected
    bench.judge_remains(row, session)
    bench.judge_exact(row, trial)
    row.checks.append("one command of torchrun, which ended with 0")


def rank_hang_row(bench: Bench, row: Row) -> None:
    """Stop ranks so that they hang; the others end the run in time, and it is continued."""
    draws = bench.draws(row.name)
    options = {"timeout": WORKER_TIMEOUT, "rank_timeout": HANG_TIMEOUT}
    trial = bench.trial(row.name, bench.config(rollout=options))
    number = bench.counts["rank_hangs"]
    slowest = 0.0
    for k in range(number):
        session = trial.start()
        target = drawn_target(bench, trial, draws, k, number)
        rank = (k + 1) % bench.ranks
        process = _await_rank(trial, session, "step", target, draws, rank)
        if process is None:
            row.expect(False, f"the run ended before hang {k + 1} of {number}")
            break
        process.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        row.injected += 1
        _expect_loss(bench, row, session, rank, "hang")
        slowest = max(slowest, time.monotonic() - stopped_at)
        row.survived += 1
        bench.say(f"hang {k + 1} of {number}: rank {rank}")
    bench.judge_remains(row, trial.finish())
    bench.judge_exact(row, trial)
    row.checks.append(
        f"rollout.rank_timeout {HANG_TIMEOUT:g} s; all processes had ended after at most"
        f" {slowest:.1f} s"
    )


def rank_worker_row(bench: Bench, row: Row) -> None:
    """Kill the workers of a rank; it rebuilds its environments, and the others wait for the step.

    A worker steps an environment of each task: a fault costs at most one step of each.
    """
    draws = bench.draws(row.name)
    number = bench.counts["rank_workers"]
    config = bench.config(
        data={"capacity": 2 * bench.total_steps}, rollout={"max_restarts": 10_000}
    )
    trial = bench.trial(row.name, config)
    session = trial.start()
    first: dict[int, int] = {}
    for k in range(number):
        target = (k + draws.random()) / number * 0.9 * bench.total_steps
        session.wait_until(
            lambda: trial.stepping(session) and trial.env_steps() >= target  # noqa: B023
        )
        rank = draws.randrange(bench.ranks)
        ranks = session.ranks()
        workers = {other: session.workers(process) for other, process in ranks.items()}
        if not workers.get(rank):
            row.expect(False, f"the run ended before fault {k + 1} of {number}")
            break
        first = first or {other: process.pid for other, process in ranks.items()}
        is_same = first == {other: process.pid for other, process in ranks.items()}
        row.expect(is_same, "a rank was started again")
        workers[rank][0].kill()
        row.injected += 1
        said = f"rank {rank}: environments are rebuilt"
        before = session.text().count(said)
        session.wait_until(lambda: session.text().count(said) > before)  # noqa: B023
        for other, process in session.ranks().items():
            kept = {worker.pid for worker in session.workers(process)}
            is_kept = other == rank or kept == {worker.pid for worker in workers[other]}
            row.expect(is_kept, f"a worker of rank {other} was started again")
        bench.say(f"worker {k + 1} of {number}: of rank {rank}, {trial.env_steps()} env steps seen")
    session.expect_end(0)
    bench.judge_remains(row, session)
    _judge_toy_rows(bench, row, trial)


def _judge_toy_rows(bench: Bench, row: Row, trial: Trial) -> None:
    """Check that every row happened and none is missing."""
    outcome = read_outcome(trial.folder, trial.config)
    counters = outcome.counters
    chains = [examine_toy(rows, ring % TOY_TASKS) for ring, rows in enumerate(outcome.rings)]
    stored = sum(len(rows["reward"]) for rows in outcome.rings)
    dropped = counters["dropped_transitions"]
    happened = counters["vector_steps"] * len(chains) - dropped
    cut = sum(chain.cut for chain in chains)
    restarts = counters["worker_restarts"]
    row.false = sum(chain.false for chain in chains)
    row.lost = abs(happened - stored) + abs(counters["env_steps"] - stored)
    row.survived = min(row.injected, restarts)
    row.expect(restarts == row.injected, f"{restarts} restarts for {row.injected} faults")
    most = TOY_TASKS * row.injected
    row.expect(cut <= most, f"{cut} episodes were broken by {row.injected} faults")
    row.expect(dropped <= most, f"{dropped} transitions were dropped for {row.injected} faults")
    row.expect(not any(chain.overlong for chain in chains), "an episode did not end in time")
    row.checks.append(
        f"{restarts} restarts, {dropped} steps dropped, {cut} episodes broken, {stored} rows"
        " stored; the other ranks and their workers stayed"
    )


def _await_rank(
    trial: Trial,
    session: Session,
    moment: str,
    target: float,
    draws: random.Random,
    rank: int,
) -> psutil.Process | None:
    """Wait for a moment; return the process of a rank, or None if the run has ended."""
    if moment == "start":
        session.wait_until(lambda: rank in session.ranks())
    if not await_moment(trial, session, moment, target, draws):
        return None
    return session.ranks().get(rank)


def _expect_loss(bench: Bench, row: Row, session: Session, rank: int, moment: str) -> None:
    """Check that all processes end, with an error that names the one that was lost."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        session.process.wait(END_SECONDS)
    code = session.process.poll()
    row.expect(code not in (None, 0), f"the run ended with {code} when rank {rank} was lost")
    left, seconds = session.remains(END_SECONDS)
    row.expect(not left, f"left after {seconds:.0f} s: {left}")
    is_named = f"rank {rank} has " in session.text()
    if moment != "start":  # where the processes may not be connected yet
        row.expect(is_named, f"no message names rank {rank}: {session.text()[-500:]}")
    if moment == "hang":
        said = f"rank {rank} has not answered"
        row.expect(said in session.text(), f"no message says {said!r}")


def _pids(session: Session) -> set[int]:
    return {process.pid for process in session.ranks().values()}
