"""One run of a sweep: its process, its folder, and the metric that it logs. No PyTorch."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports.metrics_file import METRICS, Curve, MetricsReader
from mtrl_lightning.reports.record import is_evaluation
from mtrl_lightning.runs import check_idle, versions

PROGRAM = (sys.executable, "-m", "mtrl_lightning.sweeps.child")
"""What starts a run."""
SECONDS_TO_SAVE = 120.0
"""A run that was interrupted and has not ended after this time is killed."""
SUBMITTED_BY = ("SLURM_NTASKS",)
"""Variables by which Lightning finds a SLURM job: the sweep is requeued, not each of its runs."""


class Outcome(NamedTuple):
    """What a run came to."""

    best: float
    """The metric's best value in the course of the run."""
    last: float
    env_steps: int
    """Environment steps at the best value."""
    per_task: dict[str, float]
    """The metric of each task at the best value; empty if it has no tasks."""


def run_name(trial: int, seed: int | None) -> str:
    """Return the name of a run in its sweep's folder; a seed of None is that of the command."""
    return f"trial_{trial:04d}/{'run' if seed is None else f'seed_{seed}'}"


class SweepRun:
    """One run: a trial's configuration with one seed.

    Args:
        root: folder of all runs.
        name: of the run, below ``root``; its folder is ``ROOT/NAME/version_N``.
        arguments: of the program.
        threads: of PyTorch's processor kernels.
        program: what the arguments are given to.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        arguments: Sequence[str],
        threads: int,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._root = root
        self._name = name
        own = [f"--root={root}", f"--name={name}", "--trainer.enable_progress_bar=false"]
        self.command = [*program, *arguments, *own]
        self.log = root / f"{name}.log"
        self._environment = {**os.environ, **_import_paths(), "OMP_NUM_THREADS": str(threads)}
        for variable in SUBMITTED_BY:
            self._environment.pop(variable, None)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: MetricsReader | None = None
        self._curves: dict[str, Curve] = {}

    def start(self) -> None:
        """Start the process; it continues from a former start's last checkpoint.

        Raises:
            ConfigurationError: if the former start's process does not end.
        """
        self._wait_until_idle()
        has_checkpoint = any(
            (folder / "checkpoints" / "last.ckpt").is_file() for folder in self._folders
        )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.command, *(["--ckpt_path=last"] if has_checkpoint else [])],
                stdin=subprocess.PIPE,  # closed by the kernel when the sweep is killed
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C in a terminal reaches the sweep alone
            )

    def _wait_until_idle(self) -> None:
        """Wait for a process that a killed sweep left, which is saving its checkpoint."""
        end = time.monotonic() + SECONDS_TO_SAVE
        for folder in self._folders:
            while True:
                try:
                    check_idle(folder)
                    break
                except ConfigurationError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.2)

    @property
    def _folders(self) -> list[Path]:
        return versions(str(self._root), self._name)

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        assert self._process is not None, "the run was started"
        return self._process.poll()

    def interrupt(self) -> None:
        """Let the run save and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = SECONDS_TO_SAVE) -> None:
        """Wait for the end; kill the run if it does not come."""
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def curves(self) -> dict[str, Curve]:
        """Return every metric that the run has logged so far as ``(env_steps, values)``."""
        for folder in reversed(self._folders):
            path = folder / METRICS
            if self._reader is None or self._reader.path != path:
                self._reader = MetricsReader(path)
            try:
                self._curves = self._reader.read()
            except FileNotFoundError:
                continue
            except (OSError, ValueError):  # damaged: what was read before is kept
                pass
            break
        return self._curves

    def outcome(self, metric: str, is_maximized: bool) -> Outcome:
        """Return what the run came to.

        Raises:
            ConfigurationError: if it never logged the metric.
        """
        curves = self.curves()
        env_steps, values = finite(curves.get(metric, ([], [])))
        if not values:
            raise ConfigurationError(missing_metric(metric, curves))
        best = max(values) if is_maximized else min(values)
        at_best = env_steps[values.index(best)]
        per_task = {}
        for name, (steps, task_values) in curves.items():
            if name.startswith(f"{metric}/") and at_best in steps:
                per_task[name.removeprefix(f"{metric}/")] = task_values[steps.index(at_best)]
        return Outcome(best, values[-1], at_best, per_task)

    def failure(self) -> str:
        """Return why the run failed: its last error, or the end of what it printed."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        errors = [line for line in lines if line.startswith("error:")]
        told = errors[-1:] or [line for line in lines if line.strip()][-3:]
        return " | ".join(told) or "it printed nothing"


def _import_paths() -> dict[str, str]:
    """Return variables by which a run imports this package, and none of the working directory.

    The program itself adds the working directory, behind the installed packages.
    """
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def finite(curve: Curve) -> Curve:
    """Return the points of a curve whose values are finite."""
    points = [(x, y) for x, y in zip(*curve, strict=True) if math.isfinite(y)]
    return [x for x, _ in points], [y for _, y in points]


def missing_metric(metric: str, curves: dict[str, Curve]) -> str:
    """Return the message for a metric that a run has not logged.

    Args:
        metric: of the sweep file.
        curves: what the run logged.
    """
    averages = sorted(name for name in curves if name.count("/") == 1)
    logged = [name for name in averages if is_evaluation(name)] or averages
    return (
        f"the runs of this sweep log no {metric}, but {', '.join(logged) or 'nothing'}:"
        " set metric.name in the sweep file to one of these"
    )
