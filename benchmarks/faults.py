"""Which faults a run survives at random moments: kills and hangs of its processes and workers.

A small MetaWorld run goes through the real command line, uninterrupted once, and then with faults.
With --ranks 2 it is a run of two processes. The table has the faults that were injected and
survived, the transitions that were lost (happened and not stored) or false (stored and never
happened), and whether the end equals that of the uninterrupted run, bit for bit. The exit code is 1
if a row fails; then the runs are kept.

Faults at fixed places are in the tests: broken environments, signals, a full disk, damaged files.

Shapes: ``N`` rows of one environment in their order, ``D`` observation.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil
from torch import Tensor

from benchmarks.measuring import COMMAND, Program, environment, positive, say
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.checkpoints.parts import manifests_of
from mtrl_lightning.envs import MetaWorld
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import RingStorage
from mtrl_lightning.schema import transition_fields

TASKS = ["reach", "push"]
HORIZON = 50
NUM_WORKERS = 2
WORKER_TIMEOUT = 20.0
"""Seconds after which a stopped worker counts as hung; rebuilding an environment must take less."""
RANK_TIMEOUT = 30.0
"""Seconds after which a process that is stopped counts as lost."""
END_SECONDS = 120.0
"""Within this time all processes of a run have ended when one is killed, on busy cores."""
FRAME = 18
"""Index in MetaWorld's observation at which the previous frame begins."""
GOAL = 36
"""Index at which the goal begins."""
MARK = "MTRL_LIGHTNING_FAULTS"
"""Environment variable by which the processes of a session are found."""
Rows: TypeAlias = Mapping[str, Tensor]
"""Transitions, by the names of their fields."""


@dataclass
class Row:
    """The result of one kind of fault."""

    name: str
    number: int
    """Faults to inject."""
    injected: int = 0
    survived: int = 0
    """Faults after which the run continued, or was continued, as it must."""
    lost: int | None = None
    """Transitions that happened and are not in the replay."""
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

    def expect_nothing_left(self, session: Session, seconds: float = 20.0) -> None:
        """Check that nothing of an ended process is left after a time."""
        left = session.remains(seconds)
        self.expect(not left, f"left after {seconds:.0f} s: {left}")

    @property
    def ok(self) -> bool:
        """Whether faults were injected and all went as it must."""
        is_whole = 0 < self.injected == self.survived and self.lost == self.false == 0
        return is_whole and self.exact is not False and not self.failures

    def shown(self) -> dict[str, Any]:
        """Return the row of the table."""
        names = ("injected", "survived", "lost", "false", "seconds")
        exact = {None: None, True: "yes", False: "no"}[self.exact]
        verdict = {"exact": exact, "verdict": "ok" if self.ok else "FAILED"}
        return {"fault": self.name} | {name: getattr(self, name) for name in names} | verdict


# ---- processes ----


class Session:
    """One process of the command line with all that it started.

    Args:
        command: to start.
        log: file of its output.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        # inherited by all processes that it starts, so that they are found when they are left
        self._mark = uuid.uuid4().hex
        self._log = log
        self.start_time = time.time()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment(OMP_NUM_THREADS="1", **{MARK: self._mark}),
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether the main process lives."""
        return self.process.poll() is None

    def text(self) -> str:
        """Return the output."""
        return self._log.read_text(errors="replace")

    def wait_until(
        self, condition: Callable[[], bool], seconds: float = 300.0, interval: float = 0.02
    ) -> None:
        """Wait for a condition, or for the end of the process.

        Raises:
            RuntimeError: if neither comes in time.
        """
        end = time.monotonic() + seconds
        while self.is_running and not condition():
            if time.monotonic() > end:
                raise self.error(f"has nothing within {seconds:g} s")
            time.sleep(interval)

    def expect_end(self, seconds: float = 600.0) -> None:
        """Wait for the end.

        Raises:
            RuntimeError: if it does not come, or with an exit code that is not 0.
        """
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self.error(f"did not end within {seconds:g} s") from None
        if code != 0:
            raise self.error(f"ended with {code} in place of 0")

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the living processes of the run, by their rank."""
        ranks = {}
        with contextlib.suppress(psutil.Error):
            main = psutil.Process(self.process.pid)
            for process in (main, *main.children()):
                with contextlib.suppress(psutil.Error, KeyError):
                    environ = process.environ()
                    if is_alive(process) and not _is_worker(process):
                        # Lightning sets the variable for the further ones, and torchrun for all
                        is_main = process == main and "fit" in process.cmdline()[:4]
                        ranks[0 if is_main else int(environ["LOCAL_RANK"])] = process
        return ranks

    def workers(self) -> dict[int, set[psutil.Process]]:
        """Return the living worker processes of each rank."""
        found: dict[int, set[psutil.Process]] = {}
        for rank, process in self.ranks().items():
            found[rank] = set()
            with contextlib.suppress(psutil.Error):
                children = process.children()
                found[rank] = {one for one in children if is_alive(one) and _is_worker(one)}
        return found

    def remains(self, seconds: float) -> list[str]:
        """Wait until nothing of an ended process is left; return what is left after a time."""
        end = time.monotonic() + seconds
        while True:
            left = []
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):
                    if process.environ().get(MARK) == self._mark:
                        left.append(f"process {process.pid} ({' '.join(process.cmdline())[:80]})")
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.05)

    def error(self, text: str) -> RuntimeError:
        """Return an error with the end of the output."""
        return RuntimeError(f"the run {text}:\n{self.text()[-1500:]}")

    def close(self) -> None:
        """End the process and its workers."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "envs.vector.worker" in " ".join(process.cmdline())
    except psutil.Error:
        return False


class FaultRun:
    """A run with a root of its own, started as often as faults end it.

    Args:
        root: folder of the run and its output.
        options: of the command line, by their names.
    """

    def __init__(self, root: Path, options: Mapping[str, Any]) -> None:
        self.sessions: list[Session] = []
        self.folder = root / "run" / "version_0"
        self.last = self.folder / "checkpoints" / "last.ckpt"
        self._root = root
        self._options = [f"--{name}={value}" for name, value in options.items()]
        root.mkdir(parents=True)

    def start(self, *launcher: str) -> Session:
        """Start the command line, which continues if there is a checkpoint.

        Args:
            *launcher: words before it, such as those of ``torchrun``.
        """
        if not self.last.is_file():  # the version of a run that has none is made again
            shutil.rmtree(self.folder, ignore_errors=True)
        command = [sys.executable, *launcher, *COMMAND, "fit", "-c", "quickstart"]
        command += [f"--root={self._root}", *self._options]
        if self.last.is_file():
            command.append("--ckpt_path=last")
        log = self._root / f"session_{len(self.sessions):03d}.log"
        self.sessions.append(Session(command, log))
        return self.sessions[-1]

    def env_steps(self, session: Session) -> int:
        """Return the env steps in ``metrics.csv``, 0 if the session has not written to it yet."""
        path = self.folder / "metrics.csv"
        with contextlib.suppress(OSError, ValueError, IndexError):
            if path.stat().st_mtime > session.start_time:
                last_whole_row = path.read_text(errors="replace").split("\n")[1:-1][-1]
                return int(last_whole_row.split(",")[0])
        return 0

    def unfinished(self, since: float = 0.0) -> list[str]:
        """Return the names of the unfinished files of a save that were written since a time."""
        names: list[str] = []
        with contextlib.suppress(OSError):  # one is finished meanwhile
            for pattern in ("checkpoints/*.unfinished", "replay/**/*.unfinished"):
                files = self.folder.glob(pattern)
                names += [path.name for path in files if path.stat().st_mtime >= since]
        return names


# ---- the files of a run, and comparisons ----


class Outcome(NamedTuple):
    """The files of a run, for a comparison."""

    state: dict[str, Any]
    """Parts of the last checkpoint that must not depend on how often the run was interrupted."""
    rings: list[Rows]
    """The replay, one environment after another, oldest row first; of all ranks in turn."""
    metrics: list[dict[str, str]]
    """``metrics.csv`` without times."""

    @property
    def counters(self) -> dict[str, int]:
        """The checkpoint's counters."""
        return self.state["mtrl_lightning"]["counters"]


def read_outcome(run: FaultRun) -> Outcome:
    """Read a run's last checkpoint, its replay and its metrics."""
    checkpoint = load_checkpoint(run.last)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "mtrl_lightning")
    state = {key: checkpoint[key] for key in names}
    ranks = checkpoint.get("ranks", [])
    state["ranks"] = [{**part, "data": part["data"]["buffer"]} for part in ranks]
    state["generators"] = checkpoint["MultiTaskData"]["buffer"]
    callbacks = checkpoint["callbacks"]
    state["callbacks"] = {key: callbacks[key] for key in callbacks if key != "checkpoint"}
    del state["callbacks"]["metrics"]["metrics_csv"]["crc32"]  # the file has times in it
    fields = transition_fields(MetaWorld(TASKS, horizon=HORIZON).spec)
    rings: list[Rows] = []
    for manifest in manifests_of(checkpoint):
        storage = RingStorage(fields, len(manifest["added"]), manifest["capacity"])
        ReplaySnapshots(run.folder / "replay" / manifest.get("folder", "")).load(manifest, storage)
        first_E = storage.added_E - storage.size_E
        for ring, (first, end) in enumerate(zip(first_E, storage.added_E, strict=True)):
            rings.append(storage.take(*storage.numbers(ring, int(first), int(end))))
    with (run.folder / "metrics.csv").open(newline="") as file:
        metrics = [
            {key: value for key, value in row.items() if not key.startswith("time/")}
            for row in csv.DictReader(file)
        ]
    return Outcome(state, rings, metrics)


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Return the places at which two nested values differ in type, shape or any bit of a number."""
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
        return [] if same else [where]
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return [f"{where}: other keys"]
        return [text for key in a for text in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} entries"]
        pairs = enumerate(zip(a, b, strict=True))
        return [text for i, (x, y) in pairs for text in differences(x, y, f"{where}[{i}]")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {repr(a)[:40]} and {repr(b)[:40]}"]


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


class Chain(NamedTuple):
    """How the rows of one environment follow one another."""

    false: int
    """Rows whose successor cannot have come from their observation."""
    broken: int
    """Episodes that ended before their time, as where an environment was rebuilt; missing rows.

    A fault while no step was made explains a missing row: the new episode's first action was
    chosen for the previous episode, and is dropped.
    """
    overlong: int
    """Rows beyond an episode's time."""


def check_chain(rows: Rows, horizon: int = HORIZON) -> Chain:
    """Check all rows of one MetaWorld environment, whose observations contain the frame before.

    Args:
        rows: from the beginning of an episode on, in the order in which they were stored.
        horizon: steps of an episode.
    """
    here_ND = rows["observation"].numpy()
    next_ND = rows["next_observation"].numpy()
    is_other_frame_N = (next_ND[:, FRAME:GOAL] != here_ND[:, :FRAME]).any(1)
    is_other_goal_N = (next_ND[:, GOAL:] != here_ND[:, GOAL:]).any(1)
    begins_N = (here_ND[:, :FRAME] == here_ND[:, FRAME:GOAL]).all(1)
    overlong = 0
    broken = int(not begins_N[0])
    length = 1
    for k, follows in enumerate((next_ND[:-1] == here_ND[1:]).all(1).tolist()):
        if follows:
            length += 1
            overlong += length > horizon
        elif begins_N[k + 1]:
            broken += length < horizon
            length = 1
        else:
            broken += 1
            length = 2
    return Chain(int((is_other_frame_N | is_other_goal_N).sum()), broken, overlong)


# ---- what all rows share ----


class Bench:
    """Runs in a folder, named random numbers, and the uninterrupted run.

    Args:
        folder: of all runs.
        seed: of the runs and of all faults.
        total_steps: environment steps of a run.
        ranks: processes of a run.
    """

    def __init__(self, folder: Path, seed: int, total_steps: int, ranks: int) -> None:
        self.folder = folder
        self.seed = seed
        self.total_steps = total_steps
        self.ranks = ranks
        self.num_workers = max(1, NUM_WORKERS // ranks)
        """Of each process."""
        self._runs: list[FaultRun] = []

    def generator(self, name: str) -> random.Random:
        """Return the generator of a row."""
        return random.Random(f"{self.seed} {name}")

    def run(self, name: str, **options: Any) -> FaultRun:
        """Return a run that is not started yet: small networks, many checkpoints, rings that wrap.

        Args:
            name: of its folder.
            **options: of ``data`` and ``rollout``, with ``__`` in place of the dot.
        """
        chosen = {
            "name": "run",
            "seed_everything": self.seed,
            "trainer.accelerator": "cpu",
            "trainer.devices": self.ranks,
            "trainer.enable_progress_bar": False,
            "data.benchmark.init_args.tasks": json.dumps(TASKS),
            "data.benchmark.init_args.horizon": HORIZON,
            "data.batch_size": 32,
            "data.capacity": 2_000,
            "rollout.total_steps": self.total_steps,
            "rollout.envs_per_task": self.ranks,
            "rollout.warmup_steps": 300,
            "rollout.num_workers": self.num_workers,
            "rollout.window": 10,
            "rollout.timeout": 120.0,
            "rollout.check_every": 300,
            "evaluation.every": 2_500,
            "evaluation.num_episodes": self.ranks,
            "evaluation.num_workers": 0,
            "metrics.every": 50,
            "checkpoint.every": 250,
            "checkpoint.keep_last": 3,
            "replay.chunk_mebibytes": 0.07,  # some 200 transitions
            "model.init_args.actor.init_args.width": 32,
            "model.init_args.critic.init_args.width": 32,
        }
        chosen |= {key.replace("__", "."): value for key, value in options.items()}
        self._runs.append(FaultRun(self.folder / name, chosen))
        return self._runs[-1]

    @cached_property
    def expected(self) -> Outcome:
        """The outcome of the uninterrupted run."""
        say("the uninterrupted run")
        run = self.run("uninterrupted")
        run.start().expect_end()
        return read_outcome(run)

    def judge_exact(self, row: Row, run: FaultRun) -> None:
        """Compare a run's end with that of the uninterrupted run."""
        found = read_outcome(run)
        parts = differences(self.expected._asdict(), found._asdict())
        row.exact = not parts
        row.expect(not parts, f"differs in {len(parts)} places: {', '.join(parts[:4])}")
        if not differences(self.expected.rings, found.rings):
            row.lost = row.false = 0
        env_steps = found.counters["env_steps"]
        row.expect(env_steps == self.total_steps, f"ended after {env_steps} steps")
        row.expect(not run.unfinished(), f"unfinished files are left: {run.unfinished()}")

    def judge_rows(self, row: Row, run: FaultRun) -> None:
        """Check that all rows happened and none is missing, and count the survived faults.

        Each fault costs at most one step of each environment of a worker.
        """
        outcome = read_outcome(run)
        counters = outcome.counters
        chains = [check_chain(rows) for rows in outcome.rings]
        stored = sum(len(rows["reward"]) for rows in outcome.rings)
        dropped = counters["dropped_transitions"]
        restarts = counters["worker_restarts"]
        happened = counters["vector_steps"] * len(chains) - dropped
        broken = sum(chain.broken for chain in chains)
        most = row.injected * len(TASKS) // self.num_workers
        row.false = sum(chain.false for chain in chains)
        row.lost = abs(happened - stored) + abs(counters["env_steps"] - stored)
        row.lost += max(0, broken - most)
        row.survived = min(row.injected, restarts)
        row.expect(restarts == row.injected, f"{restarts} restarts, {row.injected} faults")
        row.expect(counters["env_steps"] >= self.total_steps, "ended too early")
        row.expect(not any(chain.overlong for chain in chains), "an episode did not end in time")
        row.expect(
            broken <= dropped <= most,
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
        for session in (session for run in self._runs for session in run.sessions):
            session.close()


# ---- interruptions, after which the run is continued to the same end ----


def interrupt(
    bench: Bench,
    row: Row,
    moments: Sequence[str],
    strike: Callable[[Session, psutil.Process, int], None],
    **options: Any,
) -> None:
    """Interrupt a run at moments, continue each time, and compare the end.

    ``moments`` has ``start``, ``step`` or ``save`` for each fault. ``strike`` injects the fault
    into a process, the main one or that of a rank in turn, and checks how the run ends; it gets
    the number of the fault. ``options`` are those of ``Bench.run``.
    """
    generator = bench.generator(row.name)
    run = bench.run(row.name, **options)
    hits = 0
    for k, moment in enumerate(moments):
        session = run.start()
        # in its share of the run, and not at the end
        point = (k + generator.random()) / len(moments) * 0.93 * bench.total_steps
        rank = k % bench.ranks
        session.wait_until(lambda: rank in session.ranks())  # noqa: B023
        if moment == "start":
            end = time.monotonic() + generator.uniform(0.1, 9.0)
            session.wait_until(lambda: time.monotonic() > end or run.env_steps(session) > 0)  # noqa: B023
        else:
            session.wait_until(lambda: run.env_steps(session) >= point)  # noqa: B023
        if moment == "step":
            time.sleep(generator.uniform(0.0, 0.4))
        elif moment == "save":
            session.wait_until(lambda: bool(run.unfinished(session.start_time)), interval=0.0)  # noqa: B023
            time.sleep(generator.choice([0.0, 0.0, generator.uniform(0.0, 0.005)]))
        process = session.ranks().get(rank)
        if process is None:
            session.expect_end()
            row.expect(False, f"the run ended before fault {k + 1} of {len(moments)}")
            break
        row.injected += 1
        strike(session, process, k)
        hits += bool(run.unfinished(session.start_time))
        row.survived += 1
        seen = run.env_steps(session)
        say(f"{row.name} {k + 1} of {len(moments)}: {moment}, {seen} env steps seen")
    session = run.start()
    session.expect_end()
    row.expect_nothing_left(session)
    bench.judge_exact(row, run)
    counts = ", ".join(f"{number} meant for {name}" for name, number in Counter(moments).items())
    row.checks.append(f"{counts}; {hits} left an unfinished file")


def kill_row(bench: Bench, row: Row) -> None:
    """Kill the main process, or each rank in turn, while the run starts, steps and saves."""
    starts = row.number // 6
    steps = row.number // 3
    moments = ["start"] * starts + ["step"] * steps + ["save"] * (row.number - starts - steps)
    bench.generator(f"{row.name} moments").shuffle(moments)

    def strike(session: Session, process: psutil.Process, k: int) -> None:
        process.kill()
        if bench.ranks > 1:
            # at the start the processes may not be connected yet
            message = "" if moments[k] == "start" else f"rank {k % bench.ranks} has "
            expect_loss(bench, row, session, message)
        else:
            session.process.wait()
            row.expect_nothing_left(session)

    interrupt(bench, row, moments, strike)


def rank_hang_row(bench: Bench, row: Row) -> None:
    """Stop ranks so that they hang; the others end the run in time."""

    def strike(session: Session, process: psutil.Process, k: int) -> None:
        process.send_signal(signal.SIGSTOP)
        expect_loss(bench, row, session, f"rank {k % bench.ranks} has not answered")

    timeouts = {"rollout__timeout": RANK_TIMEOUT - 5, "rollout__rank_timeout": RANK_TIMEOUT}
    interrupt(bench, row, ["step"] * row.number, strike, **timeouts)


def expect_loss(bench: Bench, row: Row, session: Session, message: str) -> None:
    """Check that all processes end, with an error that has a message."""
    start = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        session.process.wait(END_SECONDS)
    code = session.process.poll()
    row.expect(code not in (None, 0), f"the run ended with {code} when a rank was lost")
    row.expect_nothing_left(session, END_SECONDS)
    row.expect(message in session.text(), f"no message {message!r}: {session.text()[-500:]}")
    say(f"all processes had ended {time.monotonic() - start:.1f} s after the loss of a rank")


def rank_restart_row(bench: Bench, row: Row) -> None:
    """Kill ranks of a run that ``torchrun --max-restarts`` starts again itself."""
    generator = bench.generator(row.name)
    run = bench.run(row.name)
    # a rank that lost another one may be noticed as a failure of its own after the restart
    restarts = f"--max-restarts={3 * row.number}"
    processes = f"--nproc-per-node={bench.ranks}"
    session = run.start("-m", "torch.distributed.run", "--standalone", processes, restarts)
    for k in range(row.number):
        target = (k + generator.random()) / row.number * 0.9 * bench.total_steps
        # a run without a checkpoint would begin again in another folder
        session.wait_until(lambda: run.last.is_file() and run.env_steps(session) >= target)  # noqa: B023
        process = session.ranks().get(generator.randrange(bench.ranks))
        if process is None:
            row.expect(False, f"the run ended before fault {k + 1} of {row.number}")
            break
        process.kill()
        row.injected += 1
        session.wait_until(lambda: process not in session.ranks().values())  # noqa: B023
    session.expect_end()
    row.survived = row.injected
    row.expect_nothing_left(session)
    bench.judge_exact(row, run)


# ---- lost workers, after which the run continues without a false transition ----


def worker_row(bench: Bench, row: Row, sent: int = signal.SIGKILL) -> None:
    """Kill workers at random moments of one run, which continues in the same processes."""
    generator = bench.generator(row.name)
    run = bench.run(
        row.name,
        data__capacity=2 * bench.total_steps,  # which holds all transitions
        rollout__max_restarts=10_000,
        rollout__timeout=WORKER_TIMEOUT if sent == signal.SIGSTOP else 120.0,
    )
    session = run.start()
    first: dict[int, psutil.Process] = {}
    for k in range(row.number):
        target = (k + generator.random()) / row.number * 0.9 * bench.total_steps
        session.wait_until(lambda: run.env_steps(session) >= target)  # noqa: B023
        time.sleep(generator.uniform(0.0, 0.5))
        rank = generator.randrange(bench.ranks)
        complete = [bench.num_workers] * bench.ranks  # none is being rebuilt
        session.wait_until(lambda: [*map(len, session.workers().values())] == complete)  # noqa: B023
        if not session.is_running:
            row.expect(False, f"the run ended before fault {k + 1} of {row.number}")
            break
        first = first or session.ranks()
        row.expect(first == session.ranks(), "a process of the run was started again")
        workers = session.workers()
        victim = generator.choice(sorted(workers[rank], key=lambda one: one.pid))
        victim.send_signal(sent)
        row.injected += 1
        session.wait_until(lambda: not is_alive(victim))  # noqa: B023
        after = session.workers()
        for other in workers.keys() - {rank}:
            is_kept = after.get(other) == workers[other]
            row.expect(is_kept, f"a worker of rank {other} was started again")
        seen = run.env_steps(session)
        say(f"{row.name} {k + 1} of {row.number}: rank {rank}, {seen} env steps seen")
    session.expect_end()
    row.expect_nothing_left(session)
    bench.judge_rows(row, run)


# ---- the table of faults ----


Faults: TypeAlias = dict[str, tuple[Callable[[Bench, Row], None], int]]
"""Injects the faults of a row, and how many unless ``--rows`` says otherwise, by the row's name."""
FAULTS: Faults = {
    "kill": (kill_row, 20),
    "worker": (worker_row, 20),
    "hang": (partial(worker_row, sent=signal.SIGSTOP), 2),
}
RANK_FAULTS: Faults = {
    "kill": (kill_row, 20),
    "restart": (rank_restart_row, 2),
    "hang": (rank_hang_row, 2),
    "worker": (worker_row, 6),
}
"""Those of a run of several processes."""


def add_options(add: Callable[..., Any]) -> None:
    """Add the benchmark's own options."""
    text = (
        f"rows of the table, with the number of faults; without one all: {', '.join(FAULTS)}; of"
        f" several processes {', '.join(RANK_FAULTS)}"
    )
    add("--rows", nargs="+", default=[], metavar="ROW[=NUMBER]", help=text)
    add("--ranks", type=positive, default=1, help="processes of a run")
    add("--total_steps", type=positive, default=5_000, help="of a run")
    add("--seed", type=int, default=1, help="of the runs and of all faults")


def rows_of(options: argparse.Namespace) -> list[Row]:
    """Return the rows that the options choose, still empty.

    Raises:
        ConfigurationError: if there is no such row.
    """
    offered = RANK_FAULTS if options.ranks > 1 else FAULTS
    rows = []
    for text in options.rows or offered:
        name, _, number = text.partition("=")
        if name not in offered or not (number or "1").isdecimal():
            raise ConfigurationError(
                f"--rows {text}: with --ranks {options.ranks}, give {', '.join(offered)}, or a"
                " number of faults too, as kill=2"
            )
        rows.append(Row(name, int(number) if number else offered[name][1]))
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the rows."""
    folder = Path(tempfile.mkdtemp(prefix="faults-")).resolve()
    bench = Bench(folder, options.seed, options.total_steps, options.ranks)
    rows = rows_of(options)
    offered = RANK_FAULTS if options.ranks > 1 else FAULTS
    try:
        for row in rows:
            start = time.monotonic()
            try:
                offered[row.name][0](bench, row)
            except Exception as error:  # one row's failure shall not hide the others
                row.failures.append(f"{type(error).__name__}: {error}")
            row.seconds = time.monotonic() - start
            say(f"{row.name}: {'ok' if row.ok else 'FAILED'} after {row.seconds:.0f} s")
    finally:
        bench.close()
    is_ok = all(row.ok for row in rows)
    if is_ok:
        shutil.rmtree(folder)
    else:
        options.notes.append(f"the runs are kept in {folder}")
    for row in rows:
        texts = [*row.checks, *(f"FAILED: {text}" for text in row.failures)]
        options.notes += [f"{row.name}: {text}" for text in texts]
    title = f"faults of a run of {options.total_steps:,} env steps and {options.ranks} processes"
    return {"ok": is_ok, "tables": [{"title": title, "rows": [row.shown() for row in rows]}]}


program = Program("faults", __doc__, add_options, measure, rows_of, rounds=None)
options_of = program.options_of
main = program.main

if __name__ == "__main__":
    sys.exit(main())
