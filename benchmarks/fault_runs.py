"""A small run through the real command line: started, broken, continued, and judged afterwards.

Shapes: ``N`` rows of one environment in their order, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import psutil
import torch
from torch import Tensor

from benchmarks.measuring import COMMAND, environment
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.checkpoints.parts import manifests_of
from mtrl_lightning.envs import MetaWorld, ToyReach
from mtrl_lightning.envs.benchmarks.toy import STEP
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import RingStorage
from mtrl_lightning.schema import transition_fields
from mtrl_lightning.spec import EnvSpec

TOTAL_STEPS = 5_000
TASKS = ["reach", "push"]
HORIZON = 50
MLP = {"class_path": "mtrl_lightning.networks.MLP", "init_args": {"width": 32, "depth": 2}}
TOY_TASKS = 3
TOY_HORIZON = 20
TOY_TOLERANCE = 1e-5
"""Of ``ToyReach``'s positions and rewards, which are stored in single precision."""
FRAME = 18
"""Index in MetaWorld's observation at which the previous frame begins."""
GOAL = 36
"""Index at which the goal begins."""
SHARED_MEMORY = Path("/dev/shm")
MARK = "MTRL_LIGHTNING_FAULTS"
"""Environment variable by which the processes of a session are found."""
Rows: TypeAlias = Mapping[str, Tensor]
"""Transitions, by the names of their fields."""


class FaultRunError(AssertionError):
    """A run did not do what it must; the message has the end of its output."""


# ---- configurations ----


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

    Each process steps one environment per task in a worker of its own.
    """
    config = copy.deepcopy(small_run(seed, total_steps))
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


# ---- processes ----


class FaultRun:
    """A run with a root of its own, started as often as faults end it.

    Args:
        root: folder of the run.
        config: the command line's options.
        logs: folder of the output, elsewhere than the root.
    """

    def __init__(self, root: Path, config: dict[str, Any], logs: Path) -> None:
        self.root = root
        self.config = config
        self.sessions: list[Session] = []
        self._logs = logs
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

    @property
    def last(self) -> Path:
        """The last checkpoint."""
        return self.folder / "checkpoints" / "last.ckpt"

    def start(self, *options: str) -> Session:
        """Start the command line; it continues if there is a checkpoint."""
        more = [*options, "--ckpt_path=last"] if self.last.is_file() else options
        return self._start([sys.executable, *COMMAND, *self._arguments(), *more])

    def start_with_torchrun(self, ranks: int, max_restarts: int) -> Session:
        """Start the processes with ``torchrun``, which starts them again when one is lost."""
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        restarts = f"--max-restarts={max_restarts}"
        return self._start([sys.executable, *launcher, restarts, *COMMAND, *self._arguments()])

    def _arguments(self) -> list[str]:
        return ["fit", "-c", str(self._config_file), f"--root={self.root}"]

    def _start(self, command: list[str]) -> Session:
        log = self._logs / f"session_{len(self.sessions):03d}.log"
        self.sessions.append(Session(command, log))
        return self.sessions[-1]

    def finish(self, *options: str) -> Session:
        """Start the command line and wait for its end.

        Raises:
            FaultRunError: if it ends with an error.
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

    def is_stepping(self, session: Session) -> bool:
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
        ranks = range(self.config["trainer"].get("devices", 0))
        names = ("checkpoints", "replay", *(f"replay/rank_{rank}" for rank in ranks))
        files: list[str] = []
        for name in names:
            place = (folder or self.folder) / name
            with contextlib.suppress(OSError), os.scandir(place) as entries:
                files.extend(
                    entry.name
                    for entry in entries
                    if entry.name.endswith(".unfinished") and entry.stat().st_mtime >= since
                )
        return files

    def close(self) -> None:
        """End every session that is left."""
        for session in self.sessions:
            session.close()


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
    ) -> bool:
        """Wait for a condition; return False if the process ends first.

        Raises:
            FaultRunError: if neither comes in time.
        """
        end = time.monotonic() + seconds
        while not condition():
            if not self.is_running:
                return condition()
            if time.monotonic() > end:
                raise self.error(f"has nothing within {seconds:g} s")
            time.sleep(interval)
        return True

    def expect_end(self, code: int, seconds: float = 600.0) -> None:
        """Wait for the end.

        Raises:
            FaultRunError: if it does not come, or with another exit code.
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

    def workers(self, of: psutil.Process) -> list[psutil.Process]:
        """Return the living worker processes of a process of the run."""
        with contextlib.suppress(psutil.Error):
            return [child for child in of.children() if is_alive(child) and _is_worker(child)]
        return []

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

    def remains(self, seconds: float = 20.0) -> tuple[list[str], float]:
        """Wait until nothing of an ended process is left; return the rest, and the seconds."""
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
                if process.environ().get(MARK) == self._mark:
                    yield f"process {process.pid} ({' '.join(process.cmdline())[:80]})"

    def error(self, text: str) -> FaultRunError:
        """Return an error with the end of the output."""
        return FaultRunError(f"the run {text}:\n{self.text()[-1500:]}")

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


# ---- the files of a run ----


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
    folder = run.folder
    checkpoint = load_checkpoint(run.last)
    names = ("state_dict", "optimizer_states", "lr_schedulers", "mtrl_lightning")
    state = {key: checkpoint[key] for key in names}
    ranks = checkpoint.get("ranks", [])
    state["ranks"] = [{**part, "data": part["data"]["buffer"]} for part in ranks]
    state["generators"] = checkpoint["MultiTaskData"]["buffer"]
    callbacks = checkpoint["callbacks"]
    state["callbacks"] = {key: callbacks[key] for key in callbacks if key != "checkpoint"}
    del state["callbacks"]["metrics"]["metrics_csv"]["crc32"]  # the file has times in it
    spec = spec_of(run.config)
    rings: list[Rows] = []
    for manifest in manifests_of(checkpoint):
        place = folder / "replay" / manifest.get("folder", "")
        rings += rings_of(load_replay(place, manifest, spec))
    with (folder / "metrics.csv").open(newline="") as file:
        metrics = [
            {key: value for key, value in row.items() if not key.startswith("time/")}
            for row in csv.DictReader(file)
        ]
    return Outcome(state, rings, metrics)


def spec_of(config: Mapping[str, Any]) -> EnvSpec:
    """Return the spec of a configuration's tasks."""
    given = config["data"]["benchmark"]["init_args"]
    if "num_tasks" in given:
        return ToyReach(given["num_tasks"], given["horizon"]).spec
    return MetaWorld(given["tasks"], horizon=given["horizon"]).spec


def load_replay(folder: Path, manifest: dict[str, Any], spec: EnvSpec) -> RingStorage:
    """Read the rows of a manifest."""
    num_envs = len(manifest["added"])
    storage = RingStorage(transition_fields(spec), num_envs, manifest["capacity"])
    ReplaySnapshots(folder).load(manifest, storage)
    return storage


def rings_of(storage: RingStorage) -> list[Rows]:
    """Return each ring's rows, oldest first."""
    first_E = (storage.added_E - storage.size_E).tolist()
    spans = enumerate(zip(first_E, storage.added_E.tolist(), strict=True))
    return [storage.take(*storage.numbers(ring, first, end)) for ring, (first, end) in spans]


# ---- comparisons and checks ----


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


def compare_rows(expected: Sequence[Rows], found: Sequence[Rows]) -> tuple[int, int]:
    """Compare replays row by row, whatever their order.

    Returns:
        Rows of the first that the second lacks (lost), and of the second that the first lacks
        (false).
    """
    lost = 0
    false = 0
    for a, b in zip(expected, found, strict=True):
        rows_a = Counter(_row_bytes(a))
        rows_b = Counter(_row_bytes(b))
        lost += (rows_a - rows_b).total()
        false += (rows_b - rows_a).total()
    return lost, false


def _row_bytes(rows: Rows) -> list[bytes]:
    fields = [field.numpy().reshape(len(field), -1).astype(np.float64) for field in rows.values()]
    return [row.tobytes() for row in np.concatenate(fields, axis=1)]


class Chain(NamedTuple):
    """How the rows of one environment follow one another."""

    false: int
    """Rows whose successor cannot have come from their observation."""
    cut: int
    """Episodes that ended before their time, as they do where an environment was rebuilt."""
    torn: int
    """Places where a row is missing: the next neither follows the one before nor begins an episode.

    A fault while no step was made explains one: the new episode's first action was chosen for the
    previous episode, and is dropped.
    """
    overlong: int
    """Rows beyond an episode's time."""


def check_chain(rows: Rows, horizon: int, from_beginning: bool = True) -> Chain:
    """Check the rows of one MetaWorld environment, whose observations contain the frame before.

    Args:
        rows: in the order in which they were stored.
        horizon: steps of an episode.
        from_beginning: whether the first row begins an episode; else its beginning is not known.
    """
    here_ND = rows["observation"].numpy()
    next_ND = rows["next_observation"].numpy()
    is_other_frame_N = (next_ND[:, FRAME:GOAL] != here_ND[:, :FRAME]).any(1)
    is_other_goal_N = (next_ND[:, GOAL:] != here_ND[:, GOAL:]).any(1)
    begins_N = (here_ND[:, :FRAME] == here_ND[:, FRAME:GOAL]).all(1)
    cut = 0
    overlong = 0
    torn = int(from_beginning and not begins_N[0])
    length: int | None = 1 if from_beginning else None
    for k, follows in enumerate((next_ND[:-1] == here_ND[1:]).all(1).tolist()):
        if follows:
            length = None if length is None else length + 1
            overlong += length is not None and length > horizon
        elif begins_N[k + 1]:
            cut += length is not None and length < horizon
            length = 1
        else:
            torn += 1
            length = 2
    return Chain(int((is_other_frame_N | is_other_goal_N).sum()), cut, torn, overlong)


def check_toy_chain(rows: Rows, task: int, from_beginning: bool = True) -> Chain:
    """Check the rows of one environment of ``ToyReach`` by its equations.

    A missing row cannot be told from the end of an episode: both count as ``cut``.

    Args:
        rows: in the order in which they were stored.
        task: index of the task.
        from_beginning: whether the first row begins an episode.
    """
    here_ND = rows["observation"].double()
    next_ND = rows["next_observation"].double()
    action_NA = rows["action"].double().clamp(-1, 1)
    angle = 2 * np.pi * task / TOY_TASKS
    goal_D = 0.7 * torch.tensor([np.cos(angle), np.sin(angle)])
    moved_ND = (here_ND + STEP * action_NA).clamp(-1, 1)
    reward_N = 1 - (next_ND - goal_D).norm(dim=1)
    false_N = ((next_ND - moved_ND).abs() > TOY_TOLERANCE).any(1)
    false_N |= (rows["reward"].double() - reward_N).abs() > TOY_TOLERANCE
    lengths = [1]
    for follows in (next_ND[:-1] == here_ND[1:]).all(1).tolist():
        if follows:
            lengths[-1] += 1
        else:
            lengths.append(1)
    whole = lengths[:-1] if from_beginning else lengths[1:-1]
    cut = sum(length < TOY_HORIZON for length in whole)
    overlong = sum(max(0, length - TOY_HORIZON) for length in lengths)
    return Chain(int(false_N.sum()), cut, 0, overlong)
