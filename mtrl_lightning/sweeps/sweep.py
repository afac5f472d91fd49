"""Run a sweep: start its runs, end the weak ones, and continue where it was killed. No PyTorch."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from mtrl_lightning.errors import ConfigurationError, Interrupted
from mtrl_lightning.reports.metrics_file import METRICS, Curve, MetricsReader
from mtrl_lightning.reports.record import is_evaluation
from mtrl_lightning.runs import check_idle, check_name, ensure_writable, run_lock, versions
from mtrl_lightning.sweeps.study import (
    ERROR,
    OUTCOME,
    Outcome,
    interrupted_trials,
    next_trial,
    open_study,
    outcomes_of,
)
from mtrl_lightning.sweeps.sweep_file import SweepFile, import_optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

PROGRAM = (sys.executable, "-m", "mtrl_lightning.sweeps.child")
"""The command of a run, without its arguments."""
SECONDS_BETWEEN_LOOKS = 0.3
"""How often the runs' metrics are read."""
SECONDS_TO_SAVE = 120.0
"""A run that was interrupted and has not ended after this time is killed."""
FAILURES_AT_START = 3
"""A sweep ends if its first trials, as many as this, all failed."""
ENDED_EARLY = "ended_early"
"""A trial's attribute: it was weak, and its runs were interrupted for that."""
SUBMITTED_BY = "SLURM_NTASKS"
"""Lightning finds a SLURM job by it. The sweep is requeued, not each of its runs."""


class SweepOptions(NamedTuple):
    """How a sweep is run on this machine."""

    root: Path = Path("runs")
    name: str = "sweep"
    """The sweep's folder is ``ROOT/NAME``."""
    trials: int | None = None
    """Configurations in all, those of previous starts included; None for all of a grid."""
    jobs: int = 1
    """Runs at the same time."""
    threads: int = 1
    """PyTorch's threads in each run."""
    seed: int = 0
    """Of the random configurations."""

    @property
    def folder(self) -> Path:
        """The sweep's folder."""
        return self.root / self.name


def _print(line: str) -> None:
    print(line, flush=True)


def run_sweep(
    sweep: SweepFile,
    options: SweepOptions,
    evaluation_every: int = 1,
    program: Sequence[str] = PROGRAM,
    say: Callable[[str], None] = _print,
) -> Study:
    """Train configurations until there are as many as asked for, and return Optuna's study.

    Called again after a kill, it continues the interrupted runs from their checkpoints.

    Args:
        sweep: content of the sweep file.
        options: how it is run here.
        evaluation_every: environment steps between two evaluations, the unit of Hyperband.
        program: the command of a run, without its arguments.
        say: prints a line.

    Raises:
        ConfigurationError: if the folder is in use or of another sweep, no run logs the metric, or
            the first trials all fail.
        Interrupted: if a signal ended it; the runs are saved by then.
    """
    check_name(options.name)
    ensure_writable(options.folder)
    with run_lock(options.folder), _signals_raise():
        study = open_study(options.folder, sweep, options.seed, evaluation_every)
        loop = _Loop(sweep, options, study, program, say)
        try:
            loop.run()
        except BaseException:
            loop.interrupt()
            raise
    return study


class _Run:
    """One run in a process of its own: a trial's configuration with one seed.

    Args:
        command: the program and the arguments of the configuration.
        root: folder of all runs.
        name: of the run, below ``root``; its folder is ``ROOT/NAME/version_N``.
        threads: of PyTorch.
    """

    def __init__(self, command: Sequence[str], root: Path, name: str, threads: int) -> None:
        self._root = root
        self._name = name
        self._reader: MetricsReader | None = None
        self._curves: dict[str, Curve] = {}
        folders = versions(str(root), name)
        _wait_until_idle(folders)
        own = [f"--root={root}", f"--name={name}", "--trainer.enable_progress_bar=false"]
        if any((folder / "checkpoints" / "last.ckpt").is_file() for folder in folders):
            own.append("--ckpt_path=last")
        self.log = root / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *own],
                stdin=subprocess.PIPE,  # closed by the kernel when the sweep is killed
                stdout=log,
                stderr=log,
                env=_environment(threads),
                start_new_session=True,  # Ctrl-C in a terminal reaches the sweep alone
            )

    def interrupt(self) -> None:
        """Let the run save and end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def curves(self) -> dict[str, Curve]:
        """Return every metric logged so far as ``(env_steps, values)``."""
        folders = versions(str(self._root), self._name)
        if folders:
            path = folders[-1] / METRICS
            if self._reader is None or self._reader.path != path:
                self._reader = MetricsReader(path)
            # not written yet, or damaged: what was read before is kept
            with contextlib.suppress(OSError, ValueError):
                self._curves = self._reader.read()
        return self._curves

    def curve(self, metric: str) -> Curve:
        """Return the finite values of a metric logged so far."""
        points = zip(*self.curves().get(metric, ([], [])), strict=True)
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        return [step for step, _ in finite], [value for _, value in finite]

    def outcome(self, metric: str, is_maximized: bool) -> Outcome:
        """Return the run's result.

        Raises:
            ConfigurationError: if it logged no finite value of the metric.
        """
        env_steps, values = self.curve(metric)
        curves = self.curves()
        if not values:
            averages = sorted(name for name in curves if name.count("/") == 1)
            logged = [name for name in averages if is_evaluation(name)] or averages
            raise ConfigurationError(
                f"the runs of this sweep log no {metric}, but {', '.join(logged) or 'nothing'}:"
                " set metric.name in the sweep file to one of these"
            )
        best = max(values) if is_maximized else min(values)
        at_best = env_steps[values.index(best)]
        per_task = {
            name.removeprefix(f"{metric}/"): of_task[steps.index(at_best)]
            for name, (steps, of_task) in curves.items()
            if name.startswith(f"{metric}/") and at_best in steps
        }
        return Outcome(best, values[-1], at_best, per_task)

    def failure(self) -> str:
        """Return how the run ended, with its last error or the end of its output."""
        code = self.process.returncode
        what = "was ended by a signal" if code < 0 or code > 128 else "failed"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error:")]
        shown = " | ".join(errors[-1:] or lines[-3:])
        return f"{what} (exit code {code}): {shown or 'it printed nothing'}"


def _environment(threads: int) -> dict[str, str]:
    """Return a run's environment: it imports this package, and none of the working directory.

    The program itself appends the working directory to the installed packages.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    environment.pop(SUBMITTED_BY, None)
    return environment


def _wait_until_idle(folders: Sequence[Path]) -> None:
    """Wait for a process that a killed sweep left, which is saving its checkpoint.

    Raises:
        ConfigurationError: if it does not end.
    """
    end = time.monotonic() + SECONDS_TO_SAVE
    for folder in folders:
        while True:
            try:
                check_idle(folder)
                break
            except ConfigurationError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)


class _OpenTrial:
    """A trial whose runs have not all ended."""

    def __init__(self, trial: Trial, reported: set[int], seeds: Sequence[int | None]) -> None:
        self.trial = trial
        self.reported = reported
        """Environment steps of the first seed's values that the study has."""
        self.first_seed = seeds[0]
        # a seed with a result ended before the sweep was killed
        self.waiting = [seed for seed in seeds if f"{OUTCOME}{seed}" not in trial.user_attrs]
        self.running: dict[int | None, _Run] = {}
        self.is_pruned = bool(trial.user_attrs.get(ENDED_EARLY))
        self.error: str | None = None

    @property
    def has_next(self) -> bool:
        """Whether a further run will be started."""
        return bool(self.waiting) and not self.is_pruned and self.error is None

    def label(self, seed: int | None) -> str:
        """Return the name of a run in messages."""
        return f"trial {self.trial.number}{'' if seed is None else f', seed {seed}'}"

    def interrupt(self) -> None:
        """Let the runs save and end."""
        for run in self.running.values():
            run.interrupt()


class _Loop:
    """The loop of a sweep: one process, which waits for no run but one that a killed sweep left."""

    def __init__(
        self,
        sweep: SweepFile,
        options: SweepOptions,
        study: Study,
        program: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        self._sweep = sweep
        self._options = options
        self._study = study
        self._program = program
        self._say = say
        self._open: list[_OpenTrial] = []

    def run(self) -> None:
        """Run until all trials are finished."""
        options = self._options
        for trial in interrupted_trials(self._study, options.folder, self._sweep, options.seed):
            one = self._opened(trial)
            # a kill may have come before its last value was judged
            if one.reported and one.first_seed in one.waiting:
                self._end_if_weak(one)
            what = "had ended early" if one.is_pruned else "was interrupted: it continues"
            self._say(f"trial {trial.number} {what}")
        while self._start_runs() or self._open:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            for one in list(self._open):
                self._follow(one)

    def interrupt(self) -> None:
        """Let all runs save and end; kill those that do not."""
        for one in self._open:
            one.interrupt()
        for one in self._open:
            for run in one.running.values():
                try:
                    run.process.wait(SECONDS_TO_SAVE)
                except subprocess.TimeoutExpired:
                    run.process.kill()

    def _opened(self, trial: Trial) -> _OpenTrial:
        stored = self._study.get_trials(deepcopy=False)[trial.number]
        one = _OpenTrial(trial, set(stored.intermediate_values), self._sweep.seeds)
        self._open.append(one)
        return one

    def _start_runs(self) -> bool:
        """Start runs while there is room; return whether any was started."""
        was_started = False
        while sum(len(one.running) for one in self._open) < self._options.jobs:
            one = self._next_trial()
            if one is None:
                break
            seed = one.waiting.pop(0)
            name = f"trial_{one.trial.number:04d}/{'run' if seed is None else f'seed_{seed}'}"
            command = [*self._program, *self._sweep.arguments(one.trial.params, seed)]
            options = self._options
            one.running[seed] = _Run(
                command, options.root, f"{options.name}/{name}", options.threads
            )
            values = " ".join(f"{key}={value}" for key, value in one.trial.params.items())
            self._say(f"{one.label(seed)}: started{' with ' if values else ''}{values}")
            was_started = True
        return was_started

    def _next_trial(self) -> _OpenTrial | None:
        """Return the trial that the next run belongs to; None if there is none."""
        for one in self._open:
            is_judged = self._sweep.hyperband is None or one.first_seed not in one.running
            if is_judged and one.has_next:
                return one
        limit = self._options.trials
        if limit is not None and len(self._study.get_trials(deepcopy=False)) >= limit:
            return None
        trial = next_trial(self._study, self._sweep, self._options.seed)
        return None if trial is None else self._opened(trial)

    def _follow(self, one: _OpenTrial) -> None:
        """Read what a trial's runs have logged, and finish it when all have ended."""
        for seed, run in list(one.running.items()):
            code = run.process.poll()  # before the metrics are read: else the last may be missed
            if seed == one.first_seed and not one.is_pruned:
                self._report(one, run, is_running=code is None)
            if code is None:
                continue
            del one.running[seed]
            if not one.is_pruned and one.error is None:
                self._keep(one, seed, run)
        if not one.running and not one.has_next:
            self._finish(one)

    def _report(self, one: _OpenTrial, run: _Run, is_running: bool) -> None:
        """Report the first seed's curve, and end the trial if it is weak and still running."""
        for step, value in zip(*run.curve(self._sweep.metric), strict=True):
            if step in one.reported:
                continue
            one.reported.add(step)
            one.trial.report(value, step)
            if is_running and self._end_if_weak(one):
                self._say(
                    f"{one.label(one.first_seed)}: ended early after {step:,} env steps,"
                    f" {self._sweep.metric} {value:.3f}"
                )
                return

    def _end_if_weak(self, one: _OpenTrial) -> bool:
        """End a trial if Hyperband does so at the last value that was reported.

        A sweep that is killed before its runs end does not continue it.
        """
        if self._sweep.hyperband is None or not one.trial.should_prune():
            return False
        one.is_pruned = True
        one.trial.set_user_attr(ENDED_EARLY, True)
        one.interrupt()
        return True

    def _keep(self, one: _OpenTrial, seed: int | None, run: _Run) -> None:
        """Store the result or the error of a run that has ended.

        Raises:
            ConfigurationError: if neither this run nor an earlier one logged the metric.
        """
        if run.process.returncode != 0:
            one.error = run.failure()
        else:
            try:
                outcome = run.outcome(self._sweep.metric, self._sweep.is_maximized)
            except ConfigurationError as error:
                trials = self._study.get_trials(deepcopy=False)
                if not any(outcomes_of(trial.user_attrs) for trial in trials):
                    raise
                one.error = str(error)
            else:
                one.trial.set_user_attr(f"{OUTCOME}{seed}", outcome._asdict())
                self._say(f"{one.label(seed)}: {self._sweep.metric} {outcome.best:.3f}")
                return
        self._say(f"{one.label(seed)} {one.error}; see {run.log}")
        one.interrupt()

    def _finish(self, one: _OpenTrial) -> None:
        """Store a trial's result.

        Raises:
            ConfigurationError: if it is the last one of the first trials, which all failed.
        """
        self._open.remove(one)
        states = import_optuna().trial.TrialState
        if one.is_pruned:
            self._study.tell(one.trial, state=states.PRUNED)
        elif one.error is None:
            outcomes = outcomes_of(one.trial.user_attrs)
            self._study.tell(one.trial, statistics.fmean(outcome.best for outcome in outcomes))
        else:
            one.trial.set_user_attr(ERROR, one.error)
            self._study.tell(one.trial, state=states.FAIL)
            trials = self._study.get_trials(deepcopy=False)
            finished = [trial.state for trial in trials if trial.state.is_finished()]
            if finished == [states.FAIL] * FAILURES_AT_START:
                raise ConfigurationError(
                    f"the first {FAILURES_AT_START} trials failed, the last one: it {one.error}."
                    f" Correct the cause, delete {self._options.folder} and start again"
                )


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C raise ``Interrupted``; Python allows that in the main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        for one in previous:
            signal.signal(one, signal.SIG_IGN)  # the runs are saving: a second one would lose them
        raise Interrupted(128 + number)

    try:
        previous = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:
        previous = {}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
