"""Faults of environments and their workers, which a run survives without a false transition."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench import Bench, Row
from benchmarks.judging import examine, read_outcome
from benchmarks.trial import HORIZON, Session, Trial

WAIT = 20.0
"""Seconds after which a stopped worker counts as hung; rebuilding an environment must take less."""
ALLOWED = 2
"""Restarts where more faults than that come."""


def worker_row(bench: Bench, row: Row) -> None:
    """Kill workers at random moments of one run, which continues in the same process."""
    _signalled(bench, row, bench.counts["worker_kills"], signal.SIGKILL, {"max_restarts": 10_000})


def hang_row(bench: Bench, row: Row) -> None:
    """Stop workers, so that they hang, at random moments of one run."""
    options = {"max_restarts": 10_000, "timeout": WAIT}
    _signalled(bench, row, bench.counts["hangs"], signal.SIGSTOP, options)


def _signalled(
    bench: Bench, row: Row, number: int, sent: signal.Signals, options: dict[str, Any]
) -> None:
    draws = bench.draws(row.name)
    config = _config(bench, **options)
    trial = bench.trial(row.name, config)
    session = trial.start()
    for k in range(number):
        target = (k + draws.random()) / number * 0.9 * bench.total_steps
        session.wait_until(
            lambda: trial.stepping(session) and trial.env_steps() >= target  # noqa: B023
        )
        hit = _signal_one(session, draws, sent)
        if hit is None:
            row.expect(False, f"the run ended before fault {k + 1} of {number}")
            break
        row.injected += 1
        session.wait_until(lambda: not _is_there(hit))  # noqa: B023
        bench.say(
            f"{row.name} {k + 1} of {number}:"
            f" {sent.name} to {hit.pid}, {trial.env_steps()} env steps seen"
        )
    session.expect_end(0)
    bench.judge_remains(row, session)
    restarts = _judge_rows(bench, row, trial)
    row.survived = min(row.injected, restarts)
    row.expect(
        restarts == row.injected, f"{restarts} restarts are counted for {row.injected} faults"
    )


def _signal_one(
    session: Session, draws: random.Random, sent: signal.Signals
) -> psutil.Process | None:
    """Signal a worker at random; return None if the run ended."""
    time.sleep(draws.uniform(0.0, 0.5))
    while session.running:
        for worker in draws.sample(workers := session.workers(), len(workers)):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(sent)
                return worker
        time.sleep(0.01)
    return None


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def nan_row(bench: Bench, row: Row) -> None:
    """Let environments return NaNs and infinite rewards, and raise, at random steps of one run."""
    number = bench.counts["nans"]
    ledger = bench.folder / row.name / "ledger"
    # two environments, whose faults are half of `within` apart in the mean, for half of the env
    # steps each: twice the faults would come, so that the limit is reached before the end
    within = max(2, bench.total_steps // max(number, 1))
    trial = bench.trial(
        row.name, faulty(_config(bench, max_restarts=10_000), ledger, number, within)
    )
    bench.judge_remains(row, trial.finish())
    row.injected = len(list(ledger.glob("*")))
    restarts = _judge_rows(bench, row, trial)
    row.survived = min(row.injected, restarts)
    row.expect(
        restarts == row.injected, f"{restarts} restarts are counted for {row.injected} faults"
    )
    kinds = [path.read_text().split()[1] for path in sorted(ledger.glob("*"))]
    row.checks.append(", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    bench.say(f"nan: {', '.join(kinds)}")


def exhausted_row(bench: Bench, row: Row) -> None:
    """Let environments break more often than they may be rebuilt; continue until the run's end."""
    ledger = bench.folder / row.name / "ledger"
    limit = 2 * ALLOWED + 1
    config = faulty(
        _config(bench, max_restarts=ALLOWED), ledger, limit, bench.total_steps // (2 * limit)
    )
    trial = bench.trial(row.name, config)
    ends = 0
    while True:
        before = trial.saved_steps()
        session = trial.start()
        session.process.wait(600)
        bench.judge_remains(row, session)
        if session.process.returncode == 0:
            break
        session.expect_end(1)
        ends += 1
        text = session.text()[session.text().rfind("error: ") :]
        for part in ("task '", "step ", "restarts, the most allowed"):
            row.expect(part in text, f"the message does not name {part!r}: {text[-300:]}")
        row.expect(
            any(cause in text for cause in ("not finite", "reward is", "RuntimeError")),
            f"no cause: {text}",
        )
        row.expect(
            trial.saved_steps() > before, "no checkpoint was saved at the end of the restarts"
        )
        bench.say(f"exhausted: {text.strip()[:150]}")
        if ends > limit:
            raise session.error("does not come to its end")
    row.injected = len(list(ledger.glob("*")))
    restarts = _judge_rows(bench, row, trial, ends)
    row.survived = min(row.injected, restarts + ends)
    row.expect(ends >= 1, "the restarts were never used up")
    row.checks.append(
        f"ended {ends} time(s) with code 1, a message and a checkpoint, and was continued"
    )


def _config(bench: Bench, **rollout: Any) -> dict[str, Any]:
    """Return a configuration whose replay holds all that is seen."""
    return bench.config(data={"capacity": 2 * bench.total_steps}, rollout=rollout)


def faulty(config: dict[str, Any], ledger: Path, limit: int, within: int) -> dict[str, Any]:
    """Return a configuration whose environments break; see ``FaultyMetaWorld``."""
    benchmark = config["data"]["benchmark"]
    benchmark["class_path"] = "benchmarks.faulty.FaultyMetaWorld"
    benchmark["init_args"] |= {"ledger": str(ledger), "limit": limit, "within": within}
    return config


def _judge_rows(bench: Bench, row: Row, trial: Trial, ends: int = 0) -> int:
    """Check that all rows happened and none is missing; return the run's count of restarts.

    Each fault costs at most one step, and one more where the run ended with it.
    """
    outcome = read_outcome(trial.folder, trial.config)
    counters = outcome.counters
    chains = [examine(rows, HORIZON) for rows in outcome.rings]
    stored = sum(len(rows["reward"]) for rows in outcome.rings)
    happened = counters["vector_steps"] * len(chains) - counters["dropped_transitions"]
    row.false = sum(chain.false for chain in chains)
    broken = sum(chain.cut + chain.torn for chain in chains)
    dropped = counters["dropped_transitions"]
    row.lost = (
        abs(happened - stored) + abs(counters["env_steps"] - stored) + max(0, broken - row.injected)
    )
    row.expect(
        counters["env_steps"] >= bench.total_steps, f"ended after {counters['env_steps']} env steps"
    )
    row.expect(broken <= row.injected, f"{broken} episodes were broken by {row.injected} faults")
    row.expect(not any(chain.overlong for chain in chains), "an episode did not end in time")
    row.expect(
        broken <= dropped <= row.injected + ends,
        f"{dropped} transitions were dropped for {row.injected} faults",
    )
    last = outcome.metrics[-1]
    wanted = (counters["worker_restarts"], dropped)
    logged = tuple(
        int(last[f"fault/{name}"] or -1) for name in ("worker_restarts", "dropped_transitions")
    )
    # a worker that dies while the last checkpoint is written is counted there alone
    agrees = logged[0] in (wanted[0], wanted[0] - 1) and logged[1] == wanted[1]
    row.expect(
        agrees, f"metrics.csv has {logged}, the checkpoint {wanted} restarts and dropped steps"
    )
    row.checks.append(
        f"{counters['worker_restarts']} restarts,"
        f" {dropped} steps dropped, {broken} episodes broken, {stored} rows stored"
    )
    return counters["worker_restarts"]
