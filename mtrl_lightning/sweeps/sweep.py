"""Run a sweep: start its runs, end the weak ones, and continue where it was killed. No PyTorch."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mtrl_lightning.errors import ConfigurationError, Interrupted
from mtrl_lightning.reports.metrics_file import METRICS, Curve, read_metrics
from mtrl_lightning.runs import check_idle, ensure_writable, run_lock, versions
from mtrl_lightning.sweeps.study import next_trial, open_study
from mtrl_lightning.sweeps.sweep_file import SweepFile, import_optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

PROGRAM = (sys.executable, "-P", "-m", "mtrl_lightning.sweeps.child")
"""The command of a run, without its arguments; -P: no file of the working directory hides one."""
SECONDS_BETWEEN_LOOKS = 0.3
"""How often the runs' metrics are read."""
SECONDS_TO_SAVE = 120.0
"""A run that was interrupted and has not ended after this time is killed."""
FAILURES_AT_START = 3
"""A sweep ends if its first runs, as many as this, all failed."""
ERROR = "error"
"""A trial's attribute: why it failed."""
SUBMITTED_BY = "SLURM_NTASKS"
"""Lightning finds a SLURM job by it. The sweep is requeued, not each of its runs."""


def run_sweep(
    sweep: SweepFile,
    folder: Path,
    *,
    trials: int | None = None,
    jobs: int = 1,
    evaluation_every: int = 1,
    program: Sequence[str] = PROGRAM,
) -> Study:
    """Train configurations until there are as many as asked for, and return Optuna's study.

    Called again after a kill, it continues the interrupted runs from their checkpoints.

    Args:
        sweep: content of the sweep file.
        folder: of the sweep.
        trials: configurations in all, those of previous starts included; None for all of a grid.
        jobs: runs at the same time.
        evaluation_every: environment steps between two evaluations, the unit of Hyperband.
        program: the command of a run, without its arguments.

    Raises:
        ConfigurationError: if the folder is in use or of another sweep, or the first runs all fail.
        Interrupted: if a signal ended it; the runs are saved by then.
    """
    ensure_writable(folder)
    with run_lock(folder), _signals_raise():
        study = open_study(folder, sweep, evaluation_every)
        running: list[_Run] = []
        try:
            while True:
                while len(running) < jobs:
                    trial = next_trial(study, sweep, trials)
                    if trial is None:
                        break
                    running.append(_Run(trial, sweep, folder, program))
                if not running:
                    return study
                time.sleep(SECONDS_BETWEEN_LOOKS)
                running = [run for run in running if not run.follow()]
        except BaseException:
            for run in running:
                run.process.terminate()  # it saves and ends
            for run in running:
                run.wait()
            raise


class _Run:
    """One run in a process of its own: a trial of Optuna, which is a configuration with one seed.

    Args:
        trial: with its values.
        sweep: content of the sweep file.
        folder: of the sweep.
        program: the command of a run, without its arguments.
    """

    def __init__(
        self, trial: Trial, sweep: SweepFile, folder: Path, program: Sequence[str]
    ) -> None:
        self._trial = trial
        self._sweep = sweep
        self._folder = folder
        index, place = divmod(trial.number, len(sweep.seeds))
        seed = sweep.seeds[place]
        self._name = f"trial_{index:04d}/{'run' if seed is None else f'seed_{seed}'}"
        trial.set_user_attr("run", self._name)
        self._read: tuple[Path, int, int] | None = None
        """The file of metrics that was read, its time and its size."""
        self._metrics: dict[str, Curve] = {}
        stored = trial.study.get_trials(deepcopy=False)[trial.number]
        self._values = dict(stored.intermediate_values)
        """The metric by environment steps, as far as it was reported."""
        self._is_pruned = False
        folders = versions(str(folder), self._name)
        for one in folders:
            check_idle(one)  # a killed sweep's run may still be saving its checkpoint
        command = [*program, *sweep.arguments(trial.params, seed)]
        command += [f"--root={folder}", f"--name={self._name}"]
        command.append("--trainer.enable_progress_bar=false")
        if any((one / "checkpoints" / "last.ckpt").is_file() for one in folders):
            command.append("--ckpt_path=last")
        self._log = folder / f"{self._name}.log"
        self._log.parent.mkdir(exist_ok=True)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closed by the kernel when the sweep is killed
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if name != SUBMITTED_BY},
                start_new_session=True,  # Ctrl-C in a terminal reaches the sweep alone
            )
        values = [f"{name}={value}" for name, value in trial.params.items()]
        self._print(" ".join(["continues" if folders else "started", *values]))

    def _print(self, text: str) -> None:
        print(f"{self._name}: {text}", flush=True)

    def follow(self) -> bool:
        """Report what was logged, end the run if it is weak, and return whether it has ended."""
        code = self.process.poll()  # before the metrics are read: else the last may be missed
        if not self._is_pruned:
            self._report(is_running=code is None)
        if code is not None and not self._is_pruned:
            self._finish(code)
        return code is not None

    def wait(self) -> None:
        """Wait until an interrupted run has saved; kill one that does not end."""
        try:
            self.process.wait(SECONDS_TO_SAVE)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _curves(self) -> dict[str, Curve]:
        """Return every metric logged so far as ``(env_steps, values)``."""
        folders = versions(str(self._folder), self._name)
        if folders:
            path = folders[-1] / METRICS
            # not written yet, or damaged: what was read before is kept
            with contextlib.suppress(OSError, ValueError):
                status = path.stat()
                current = (path, status.st_mtime_ns, status.st_size)
                if current != self._read:
                    self._metrics = read_metrics(path)
                    self._read = current
        return self._metrics

    def _report(self, is_running: bool) -> None:
        """Report new values of the metric, and end the run if Hyperband says so after one."""
        for step, value in zip(*self._curves().get(self._sweep.metric, ([], [])), strict=True):
            if step in self._values or not math.isfinite(value):
                continue
            self._values[step] = value
            self._trial.report(value, step)
            if is_running and self._trial.should_prune():
                self._is_pruned = True
                states = import_optuna().trial.TrialState
                self._trial.study.tell(self._trial, state=states.PRUNED)
                self.process.terminate()  # it saves and ends
                self._print(f"ended early after {step:,} env steps, {value:.3f}")
                return

    def _finish(self, code: int) -> None:
        """Store the result of a run that has ended: the metric's best value, or why it failed.

        Raises:
            ConfigurationError: if it is the last one of the first runs, which all failed.
        """
        metric = self._sweep.metric
        study = self._trial.study
        if code == 0 and self._values:
            values = self._values.values()
            best = max(values) if self._sweep.is_maximized else min(values)
            study.tell(self._trial, best)
            self._print(f"{metric} {best:.3f}")
            return
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line]
        errors = [line for line in lines if line.startswith("error:")] or lines[-1:]
        error = f"exit code {code}: {' '.join(errors[-1:])}"
        if code == 0:
            averages = sorted(name for name in self._curves() if name.count("/") == 1)
            error = f"it logged no {metric}, but {', '.join(averages)}"
        self._trial.set_user_attr(ERROR, error)
        failed = import_optuna().trial.TrialState.FAIL
        study.tell(self._trial, state=failed)
        self._print(f"failed ({error}); see {self._log}")
        ended = [one.state for one in study.get_trials(deepcopy=False) if one.state.is_finished()]
        if ended == [failed] * FAILURES_AT_START:
            raise ConfigurationError(
                f"the first {FAILURES_AT_START} runs failed, the last one: {error}. Correct the"
                f" cause, delete {self._folder} and start again"
            )


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C raise ``Interrupted``."""

    def stop(number: int, frame: FrameType | None) -> None:
        for one in previous:
            signal.signal(one, signal.SIG_IGN)  # the runs are saving: a second one would lose them
        raise Interrupted(128 + number)

    previous = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
