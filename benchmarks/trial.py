"""One small run through the real command line: started, watched, broken and continued."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measuring import environment

COMMAND = ["-m", "mtrl_lightning"]
TOTAL_STEPS = 5_000
TASKS = ["reach", "push"]
HORIZON = 50
MLP = {"class_path": "mtrl_lightning.networks.MLP", "init_args": {"width": 32, "depth": 2}}
TOY_TASKS = 3
TOY_HORIZON = 20
SHARED_MEMORY = Path("/dev/shm")


class TrialError(AssertionError):
    """A run did not do what it must; the message has the end of what it printed."""


def small_run(seed: int, total_steps: int = TOTAL_STEPS) -> dict[str, Any]:
    """Return a configuration: two tasks, small networks, many checkpoints, rings that wrap."""
    model = {
        "encoder": {"class_path": "mtrl_lightning.networks.Standardize"},
        "actor": MLP,
        "critic": MLP,
    }
    benchmark = {"tasks": TASKS, "horizon": HORIZON, "num_goals": 50}
    return {
        "seed_everything": seed,
        "name": "run",
        "trainer": {
            "accelerator": "cpu",
            "precision": "32-true",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
        "data": {
            "benchmark": {"class_path": "mtrl_lightning.envs.MetaWorld", "init_args": benchmark},
            "batch_size": 32,
            "capacity": 2_000,
        },
        "rollout": {
            "total_steps": total_steps,
            "warmup_steps": 300,
            "num_workers": 2,
            "learner_threads": 1,
            "window": 10,
            "timeout": 120.0,
        },
        "evaluation": {"every": 2_500, "num_episodes": 1, "num_workers": 0},
        "metrics": {"every": 50},
        "checkpoint": {"every": 250, "keep_last": 3},
        "replay": {"chunk_mebibytes": 0.07},  # some 200 transitions
        "model": {"class_path": "mtrl_lightning.algorithms.SAC", "init_args": model},
    }


def toy_run(seed: int, total_steps: int, ranks: int) -> dict[str, Any]:
    """Return the configuration of a run of several processes on ``ToyReach``.

    Each process steps one copy of each task in a worker of its own.
    """
    config = small_run(seed, total_steps)
    benchmark = {"num_tasks": TOY_TASKS, "horizon": TOY_HORIZON}
    config["data"] |= {
        "benchmark": {"class_path": "mtrl_lightning.envs.ToyReach", "init_args": benchmark},
        "batch_size": 8 * TOY_TASKS * ranks,
        "capacity": 1_200,
    }
    config["rollout"] |= {
        "envs_per_task": ranks,
        "warmup_steps": 30 * TOY_TASKS * ranks,
        "num_workers": 1,
        "check_every": 50 * TOY_TASKS * ranks,
    }
    config["trainer"]["devices"] = ranks
    config["evaluation"]["every"] = total_steps // 2
    config["metrics"]["every"] = 5 * TOY_TASKS * ranks
    config["checkpoint"]["every"] = 10 * TOY_TASKS * ranks
    config["replay"]["chunk_mebibytes"] = 0.003  # some 70 transitions
    return config


class Trial:
    """A run with a root of its own, started as often as faults end it.

    Args:
        root: folder of the run.
        config: the command line's options.
        logs: folder of what the run prints, elsewhere than the root.
    """

    def __init__(self, root: Path, config: dict[str, Any], logs: Path) -> None:
        self.root = root
        self.config = config
        self._logs = logs
        self.sessions: list[Session] = []
        logs.mkdir(parents=True, exist_ok=True)
        self._config_file = logs / "config.yaml"
        self._config_file.write_text(json.dumps(config, indent=1))

    @property
    def folder(self) -> Path:
        """The folder of the newest run that has a checkpoint, or else of the newest."""
        versions = sorted(
            self.root.glob("run/version_*"),
            key=lambda path: int(path.name.removeprefix("version_")),
        )
        saved = [path for path in versions if (path / "checkpoints" / "last.ckpt").is_file()]
        return [self.root, *versions, *saved][-1]

    def start(self, *options: str) -> Session:
        """Start the command line; it continues if there is a checkpoint."""
        command = [sys.executable, *COMMAND, *self._arguments(), *options]
        if (self.folder / "checkpoints" / "last.ckpt").is_file():
            command.append("--ckpt_path=last")
        return self._start(command)

    def start_with_torchrun(self, ranks: int, max_restarts: int) -> Session:
        """Start the processes with ``torchrun``, which starts them again when one is lost."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        restarts = f"--max-restarts={max_restarts}"
        return self._start([sys.executable, *launcher, restarts, *COMMAND, *self._arguments()])

    def _arguments(self) -> list[str]:
        return ["fit", "-c", str(self._config_file), f"--root={self.root}"]

    def _start(self, command: list[str]) -> Session:
        self.sessions.append(Session(command, self._logs / f"session_{len(self.sessions):03d}.log"))
        return self.sessions[-1]

    def finish(self, *options: str) -> Session:
        """Start the command line and wait for its end.

        Raises:
            TrialError: if it ends with an error.
        """
        session = self.start(*options)
        session.expect_end(0)
        return session

    def env_steps(self) -> int:
        """Return the environment steps of the last whole row of ``metrics.csv``, 0 without one."""
        try:
            lines = (self.folder / "metrics.csv").read_text(errors="replace").split("\n")[1:-1]
            return int(lines[-1].split(",")[0])
        except (OSError, ValueError, IndexError):
            return 0

    def stepping(self, session: Session) -> bool:
        """Return whether a session has written to ``metrics.csv``, or rewound it."""
        try:
            return (self.folder / "metrics.csv").stat().st_mtime > session.start_time
        except OSError:
            return False

    def saved_steps(self) -> int:
        """Return the environment steps of the latest checkpoint, 0 without one."""
        names = (path.name for path in (self.folder / "checkpoints").glob("step_*.ckpt"))
        return max((int(re.sub(r"\D", "", name)) for name in names), default=0)

    def unfinished(self, since: float = 0.0, folder: Path | None = None) -> list[str]:
        """Return the names of the unfinished files of a save that were written since a time."""
        found: list[str] = []
        replays = [
            f"replay/rank_{rank}" for rank in range(self.config["trainer"].get("devices", 0))
        ]
        for name in ("checkpoints", "replay", *replays):
            with (
                contextlib.suppress(OSError),
                os.scandir((folder or self.folder) / name) as entries,
            ):
                found.extend(
                    e.name
                    for e in entries
                    if e.name.endswith(".unfinished") and e.stat().st_mtime >= since
                )
        return found

    def close(self) -> None:
        """End every session that is left."""
        for session in self.sessions:
            session.close()


class Session:
    """One process of the command line with all that it started.

    Args:
        command: what to start.
        log: file of what it prints.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        # inherited by all processes that it starts, so that those that are left can be found
        self._mark = uuid.uuid4().hex
        self._log = log
        self.start_time = time.time()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment(OMP_NUM_THREADS="1", MTRL_LIGHTNING_TRIAL=self._mark),
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether the main process lives."""
        return self.process.poll() is None

    def text(self) -> str:
        """Return what was printed."""
        return self._log.read_text(errors="replace")

    def wait_until(
        self, condition: Callable[[], bool], seconds: float = 300.0, interval: float = 0.02
    ) -> bool:
        """Wait for a condition; return False if the process ends first.

        Raises:
            TrialError: if neither comes in time.
        """
        end = time.monotonic() + seconds
        while not condition():
            if not self.running:
                return condition()
            if time.monotonic() > end:
                raise self.error(f"nothing came within {seconds:g} s")
            time.sleep(interval)
        return True

    def expect_end(self, code: int, seconds: float = 600.0) -> None:
        """Wait for the end.

        Raises:
            TrialError: if it does not come, or with another exit code.
        """
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self.error(f"did not end within {seconds:g} s") from None
        if self.process.returncode != code:
            raise self.error(f"ended with {self.process.returncode} in place of {code}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the main process."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def workers(self, of: psutil.Process | None = None) -> list[psutil.Process]:
        """Return the living worker processes, of the main process or of another one."""
        with contextlib.suppress(psutil.Error):
            children = (of or psutil.Process(self.process.pid)).children()
            return [child for child in children if _is_worker(child)]
        return []

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the living processes of a run of several, by their rank."""
        found = {}
        with contextlib.suppress(psutil.Error):
            main = psutil.Process(self.process.pid)
            for process in (main, *main.children()):
                with contextlib.suppress(psutil.Error, KeyError):
                    environ = process.environ()
                    is_there = process.status() != psutil.STATUS_ZOMBIE
                    if is_there and not _is_worker(process):
                        # Lightning sets the variable for the further ones, and torchrun for all
                        is_main = process == main and "fit" in process.cmdline()[:4]
                        found[0 if is_main else int(environ["LOCAL_RANK"])] = process
        return found

    def remains(self, seconds: float = 20.0) -> tuple[list[str], float]:
        """Wait until nothing is left of an ended process; return what is left, and the seconds."""
        start = time.monotonic()
        while True:
            left = [*self._processes(), *_shared_memory(self.start_time)]
            waited = time.monotonic() - start
            if not left or waited >= seconds:
                return left, waited
            time.sleep(0.05)

    def _processes(self) -> Iterator[str]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("MTRL_LIGHTNING_TRIAL") == self._mark:
                    yield f"process {process.pid} ({' '.join(process.cmdline())[:80]})"

    def error(self, what: str) -> TrialError:
        """Return an error that says what went wrong and what was printed."""
        return TrialError(f"the run {what}:\n{self.text()[-1500:]}")

    def close(self) -> None:
        """End the process and its workers."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _is_worker(process: psutil.Process) -> bool:
    try:
        return (
            "envs.vector.worker" in " ".join(process.cmdline())
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False


def _shared_memory(since: float) -> Iterator[str]:
    """Yield files in shared memory, made since a time, that no living process has mapped."""
    fresh = []
    for path in SHARED_MEMORY.glob("*"):
        with contextlib.suppress(OSError):
            if path.stat().st_ctime >= since:
                fresh.append(str(path))
    if fresh:
        maps = ""
        for path in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                maps += path.read_text()
        yield from (name for name in fresh if name not in maps)
