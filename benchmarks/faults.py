"""Which faults a run survives at random moments: kills and hangs of its processes and workers.

A small MetaWorld run goes through the real command line, uninterrupted once, and then with faults.
With --ranks 2 it is a run of two processes. The table has the faults that were injected, the
transitions that were lost (happened and not stored) or false (stored and never happened), and
whether the end equals that of the uninterrupted run, bit for bit. The exit code is 1 if a row
fails; then the runs are kept.

Faults at fixed places are in the tests: broken environments, signals, a full disk, damaged files.

Shapes: ``N`` rows of one environment in their order, ``D`` observation.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil
from torch import Tensor

from benchmarks.measuring import Program, Table, positive, say
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.checkpoints.parts import manifests_of, parts_of
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


def expect(condition: bool, failure: str) -> None:
    """End a row unless a condition holds."""
    if not condition:
        raise RuntimeError(failure)


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
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark},
                start_new_session=True,
            )

    def text(self) -> str:
        """Return the end of the output."""
        return self._log.read_text(errors="replace")[-1500:]

    def wait_until(self, condition: Callable[[], bool], interval: float = 0.02) -> None:
        """Wait for a condition; the process has to live, and the time is limited."""
        end = time.monotonic() + 300.0
        while not condition():
            expect(self.process.poll() is None, f"ended before the fault: {self.text()}")
            expect(time.monotonic() < end, f"nothing happened in time: {self.text()}")
            time.sleep(interval)

    def expect_end(self) -> None:
        """Wait for the end, which must be one without an error, and leave nothing."""
        code = self.process.wait(600.0)
        expect(code == 0, f"ended with {code}: {self.text()}")
        self.expect_nothing_left(20.0)

    def expect_loss(self, message: str) -> None:
        """Check that all processes end, with an error that has a message."""
        code = self.process.wait(END_SECONDS)
        expect(code != 0, "the run ended without an error when a process was lost")
        self.expect_nothing_left(END_SECONDS)
        expect(message in self._log.read_text(errors="replace"), f"no message {message!r}")

    def expect_nothing_left(self, seconds: float) -> None:
        """Check that no process of this session is left after a time."""
        end = time.monotonic() + seconds
        while left := self._marked():
            expect(time.monotonic() < end, f"left after {seconds:.0f} s: {left}")
            time.sleep(0.05)

    def _marked(self) -> list[int]:
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark:
                    left.append(process.pid)
        return left

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

    def workers(self) -> dict[int, list[psutil.Process]]:
        """Return the living worker processes of each rank."""
        found: dict[int, list[psutil.Process]] = {}
        for rank, process in self.ranks().items():
            found[rank] = []
            with contextlib.suppress(psutil.Error):
                children = process.children()
                found[rank] = [one for one in children if is_alive(one) and _is_worker(one)]
        return found

    def close(self) -> None:
        """End the process and its workers."""
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
        command = [sys.executable, *launcher, "-m", "mtrl_lightning", "fit"]
        if self.last.is_file():
            command.append(f"--resume={self.folder}")
        else:  # the version of a run that has none is made again
            shutil.rmtree(self.folder, ignore_errors=True)
            command += ["-c", "quickstart", f"--root={self._root}", *self._options]
        log = self._root / f"session_{len(self.sessions):03d}.log"
        self.sessions.append(Session(command, log))
        return self.sessions[-1]

    def env_steps(self, session: Session) -> int:
        """Return the env steps in ``metrics.jsonl``, 0 if the session has not written to it yet."""
        path = self.folder / "metrics.jsonl"
        with contextlib.suppress(OSError, ValueError, IndexError):
            if path.stat().st_mtime > session.start_time:
                last_full_row = path.read_text(errors="replace").split("\n")[:-1][-1]
                return int(json.loads(last_full_row)["env_steps"])
        return 0

    def is_saving(self, since: float = 0.0) -> bool:
        """Return whether there are unfinished files of a save, written since a time."""
        with contextlib.suppress(OSError):  # one is finished meanwhile
            files = self.folder.rglob("*.unfinished")
            return any(path.stat().st_mtime >= since for path in files)
        return False


# ---- the files of a run, and comparisons ----


class Outcome(NamedTuple):
    """The files of a run, for a comparison."""

    state: dict[str, Any]
    """Parts of the last checkpoint that must not depend on how often the run was interrupted."""
    rings: list[Rows]
    """The replay, one environment after another, oldest row first; of all ranks in turn."""
    metrics: list[dict[str, float]]
    """``metrics.jsonl`` without times."""


def read_outcome(run: FaultRun) -> Outcome:
    """Read a run's last checkpoint, its replay and its metrics."""
    checkpoint = load_checkpoint(run.last)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "mtrl_lightning")
    state = {key: checkpoint[key] for key in names}
    state["ranks"] = [
        {**part, "data": {key: part["data"][key] for key in ("buffer", "collector")}}
        for part in parts_of(checkpoint)
    ]
    fields = transition_fields(MetaWorld(TASKS, horizon=HORIZON).spec)
    rings: list[Rows] = []
    for manifest in manifests_of(checkpoint):
        storage = RingStorage(fields, len(manifest["added"]), manifest["capacity"])
        ReplaySnapshots(run.folder / "replay" / manifest.get("folder", "")).load(manifest, storage)
        first_E = storage.added_E - storage.size_E
        for ring, (first, end) in enumerate(zip(first_E, storage.added_E, strict=True)):
            rings.append(storage.take(*storage.numbers(ring, int(first), int(end))))
    metrics = [
        {key: value for key, value in json.loads(row).items() if not key.startswith("time/")}
        for row in (run.folder / "metrics.jsonl").read_text().splitlines()
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
    broken = int(not begins_N[0])
    length = 1
    for k, follows in enumerate((next_ND[:-1] == here_ND[1:]).all(1).tolist()):
        if follows:
            length += 1
            expect(length <= horizon, "an episode did not end in time")
        elif begins_N[k + 1]:
            broken += length < horizon
            length = 1
        else:
            broken += 1
            length = 2
    return Chain(int((is_other_frame_N | is_other_goal_N).sum()), broken)


# ---- the rows of the table ----


class Bench:
    """Runs in a folder, and what all rows share.

    Args:
        folder: of all runs.
        seed: of the runs and of all faults.
        total_steps: environment steps of a run.
        ranks: processes of a run.
    """

    def __init__(self, folder: Path, seed: int, total_steps: int, ranks: int) -> None:
        self.total_steps = total_steps
        self.ranks = ranks
        self.num_workers = max(1, NUM_WORKERS // ranks)
        """Of each process."""
        self.generator = random.Random(seed)
        self._folder = folder
        self._seed = seed
        self._runs: list[FaultRun] = []
        self._expected: Outcome | None = None

    def run(self, name: str, **options: Any) -> FaultRun:
        """Return a run that is not started yet: small networks, many checkpoints, rings that wrap.

        Args:
            name: of its folder.
            **options: of the command line, with ``__`` instead of the dot.
        """
        chosen = {
            "name": "run",
            "seed_everything": self._seed,
            "trainer.accelerator": "cpu",
            "trainer.devices": self.ranks,
            "trainer.enable_progress_bar": False,
            "data.benchmark.init_args.tasks": json.dumps(TASKS),
            "data.benchmark.init_args.horizon": HORIZON,
            "data.batch_size": 32,
            "data.capacity": 2_000,
            "data.total_steps": self.total_steps,
            "data.envs_per_task": self.ranks,
            "data.warmup_steps": 300,
            "data.num_workers": self.num_workers,
            "data.window": 10,
            "data.timeout": 120.0,
            "evaluation.every": 2_500,
            "evaluation.num_episodes": self.ranks,
            "evaluation.num_workers": 0,
            "metrics.every": 50,
            "checkpoint.every_n_env_steps": 250,
            "checkpoint.save_top_k": 3,
            "data.chunk_mebibytes": 0.07,  # some 200 transitions
            "model.init_args.actor.init_args.width": 32,
            "model.init_args.critic.init_args.width": 32,
        }
        chosen |= {key.replace("__", "."): value for key, value in options.items()}
        self._runs.append(FaultRun(self._folder / name, chosen))
        return self._runs[-1]

    def moment(self, k: int, number: int) -> float:
        """Return the env steps at which a fault of a number of faults is injected."""
        return (k + self.generator.random()) / number * 0.9 * self.total_steps

    def judge_exact(self, run: FaultRun) -> dict[str, Any]:
        """Compare a run's end with that of the uninterrupted run."""
        if self._expected is None:
            say("the uninterrupted run")
            whole = self.run("uninterrupted")
            whole.start().expect_end()
            self._expected = read_outcome(whole)
        found = differences(self._expected._asdict(), read_outcome(run)._asdict())
        expect(not found, f"differs in {len(found)} places: {', '.join(found[:4])}")
        expect(not run.is_saving(), "unfinished files are left")
        return {"lost": 0, "false": 0, "bit-exact": "yes"}

    def judge_rows(self, run: FaultRun, number: int) -> dict[str, Any]:
        """Check that all rows happened and none is missing.

        Each fault costs at most one step of each environment of a worker.
        """
        outcome = read_outcome(run)
        counters = outcome.state["mtrl_lightning"]["counters"]
        chains = [check_chain(rows) for rows in outcome.rings]
        stored = sum(len(rows["reward"]) for rows in outcome.rings)
        dropped = counters["dropped_transitions"]
        happened = counters["vector_steps"] * len(chains) - dropped
        broken = sum(chain.broken for chain in chains)
        false = sum(chain.false for chain in chains)
        restarts = counters["worker_restarts"]
        most = number * len(TASKS) // self.num_workers
        lost = abs(happened - stored) + abs(counters["env_steps"] - stored)
        expect(lost == false == 0, f"{lost} transitions are lost, {false} are false")
        expect(restarts == number, f"{restarts} restarts, {number} faults")
        expect(counters["env_steps"] >= self.total_steps, "ended too early")
        expect(broken <= dropped <= most, f"{broken} episodes broken, {dropped} steps dropped")
        return {"lost": lost, "false": false, "dropped steps": dropped}

    def close(self) -> None:
        """End every process that is left."""
        for session in (session for run in self._runs for session in run.sessions):
            session.close()


Row: TypeAlias = Callable[[Bench, int], dict[str, Any]]
"""Injects a number of faults, and returns values of its row."""


def kill_row(bench: Bench, number: int) -> dict[str, Any]:
    """Kill the main process, or each rank in turn, while the run starts, steps and saves."""
    run = bench.run("kill")
    for k in range(number):
        session = run.start()
        rank = k % bench.ranks
        moment = bench.generator.choice(["start", "step", "step", "save", "save", "save"])
        target = bench.moment(k, number)
        session.wait_until(lambda: rank in session.ranks())  # noqa: B023
        if moment == "start":
            time.sleep(bench.generator.uniform(0.1, 9.0))
        else:
            session.wait_until(lambda: run.env_steps(session) >= target)  # noqa: B023
        if moment == "save":
            session.wait_until(lambda: run.is_saving(session.start_time), interval=0.0)  # noqa: B023
        session.ranks()[rank].kill()
        say(f"kill {k + 1} of {number}: {moment}, {run.env_steps(session)} env steps seen")
        if bench.ranks > 1:
            # at the start the processes may not be connected yet
            session.expect_loss("" if moment == "start" else f"rank {rank} has ")
        else:
            session.process.wait()
            session.expect_nothing_left(20.0)
    run.start().expect_end()
    return bench.judge_exact(run)


def rank_hang_row(bench: Bench, number: int) -> dict[str, Any]:
    """Stop ranks so that they hang; the others end the run in time."""
    strategy = {
        "class_path": "mtrl_lightning.ranks.strategy.RanksStrategy",
        "init_args": {"timeout": f"0:00:{RANK_TIMEOUT:g}"},
    }
    timeouts = {"data__timeout": RANK_TIMEOUT - 5, "trainer__strategy": json.dumps(strategy)}
    run = bench.run("hang", **timeouts)
    for k in range(number):
        session = run.start()
        rank = k % bench.ranks
        target = bench.moment(k, number)
        session.wait_until(lambda: run.env_steps(session) >= target)  # noqa: B023
        session.ranks()[rank].send_signal(signal.SIGSTOP)
        session.expect_loss(f"rank {rank} has not answered")
    run.start().expect_end()
    return bench.judge_exact(run)


def rank_restart_row(bench: Bench, number: int) -> dict[str, Any]:
    """Kill ranks of a run that ``torchrun --max-restarts`` starts again itself."""
    run = bench.run("restart")
    # a rank that lost another one may be noticed as a failure of its own after the restart
    restarts = f"--max-restarts={3 * number}"
    processes = f"--nproc-per-node={bench.ranks}"
    session = run.start("-m", "torch.distributed.run", "--standalone", processes, restarts)
    for k in range(number):
        target = bench.moment(k, number)
        # a run without a checkpoint would begin again in another folder
        session.wait_until(lambda: run.last.is_file() and run.env_steps(session) >= target)  # noqa: B023
        process = session.ranks()[bench.generator.randrange(bench.ranks)]
        process.kill()
        session.wait_until(lambda: not is_alive(process))  # noqa: B023
    session.expect_end()
    return bench.judge_exact(run)


def worker_row(bench: Bench, number: int, sent: int = signal.SIGKILL) -> dict[str, Any]:
    """Kill workers at random moments of one run, which continues in the same processes."""
    run = bench.run(
        f"worker_{sent}",
        data__capacity=2 * bench.total_steps,  # which holds all transitions
        data__max_restarts=10_000,
        data__timeout=WORKER_TIMEOUT if sent == signal.SIGSTOP else 120.0,
    )
    session = run.start()
    first: dict[int, psutil.Process] = {}
    for k in range(number):
        target = bench.moment(k, number)
        session.wait_until(lambda: run.env_steps(session) >= target)  # noqa: B023
        time.sleep(bench.generator.uniform(0.0, 0.5))
        complete = [bench.num_workers] * bench.ranks  # none is being rebuilt
        session.wait_until(lambda: [*map(len, session.workers().values())] == complete)  # noqa: B023
        first = first or session.ranks()
        expect(first == session.ranks(), "a process of the run was started again")
        victim = bench.generator.choice(session.workers()[bench.generator.randrange(bench.ranks)])
        victim.send_signal(sent)
        session.wait_until(lambda: not is_alive(victim))  # noqa: B023
        say(f"worker {k + 1} of {number}: {run.env_steps(session)} env steps seen")
    session.expect_end()
    return bench.judge_rows(run, number)


FAULTS: dict[str, tuple[Row, int]] = {
    "kill": (kill_row, 20),
    "worker": (worker_row, 20),
    "hang": (partial(worker_row, sent=signal.SIGSTOP), 2),
}
"""Rows by name, with the number of faults unless ``--rows`` says otherwise."""
RANK_FAULTS: dict[str, tuple[Row, int]] = {
    "kill": (kill_row, 20),
    "restart": (rank_restart_row, 2),
    "hang": (rank_hang_row, 2),
    "worker": (worker_row, 6),
}
"""Those of a run of several processes."""


def add_options(add: Callable[..., Any]) -> None:
    """Add the benchmark's own options."""
    text = (
        f"rows of the table, with the number of faults; None: all: {', '.join(FAULTS)}; of"
        f" several processes {', '.join(RANK_FAULTS)}"
    )
    add("--rows", nargs="+", metavar="ROW[=NUMBER]", help=text)
    add("--ranks", type=positive, default=1, help="processes of a run")
    add("--total_steps", type=positive, default=5_000, help="of a run")
    add("--seed", type=int, default=1, help="of the runs and of all faults")


def _check(options: argparse.Namespace) -> None:
    offered = RANK_FAULTS if options.ranks > 1 else FAULTS
    options.chosen = {}
    for text in options.rows or offered:
        name, _, number = text.partition("=")
        if name not in offered or not (number or "1").isdecimal():
            raise ConfigurationError(f"--rows {text}: give {', '.join(offered)}, or kill=2")
        row, default = offered[name]
        options.chosen[name] = row, int(number or default)


def measure(options: argparse.Namespace) -> list[Table]:
    """Run the rows."""
    folder = Path(tempfile.mkdtemp(prefix="faults-")).resolve()
    bench = Bench(folder, options.seed, options.total_steps, options.ranks)
    rows = []
    try:
        for name, (inject, number) in options.chosen.items():
            start = time.monotonic()
            try:
                row = {**inject(bench, number), "verdict": "ok"}
            except Exception as error:  # one row's failure shall not hide the others
                row = {"verdict": f"FAILED: {error}"}
            rows.append({"fault": name, "injected": number, **row})
            say(f"{name}: {row['verdict']} after {time.monotonic() - start:.0f} s")
    finally:
        bench.close()
    if any(row["verdict"] != "ok" for row in rows):
        print("\n".join(f"{row['fault']}: {row['verdict']}" for row in rows))
        sys.exit(f"the runs are kept in {folder}")
    shutil.rmtree(folder)
    title = f"faults of a run of {options.total_steps:,} env steps and {options.ranks} processes"
    return [Table(title, rows)]


program = Program("faults", __doc__, add_options, measure, _check, rounds=None)
options_of = program.options_of
main = program.main

if __name__ == "__main__":
    main()
