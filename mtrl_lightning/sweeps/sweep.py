"""Run a sweep: start its runs, end the weak ones, and continue where it was killed. No PyTorch."""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports.record import is_evaluation
from mtrl_lightning.runs import check_name, ensure_writable, run_lock
from mtrl_lightning.sweeps.runs import (
    PROGRAM,
    SweepRun,
    finite,
    missing_metric,
    run_name,
)
from mtrl_lightning.sweeps.study import ERROR, OUTCOME, Study, import_optuna
from mtrl_lightning.sweeps.sweep_file import SweepFile

if TYPE_CHECKING:
    from optuna.trial import Trial

SECONDS_BETWEEN_LOOKS = 0.3
"""How often the runs' metrics are read."""
FAILURES_AT_START = 3
"""A sweep whose first trials, so many, all failed is ended."""
ENDED_EARLY = "ended_early"
"""A trial's attribute: it was weak, and its runs were interrupted for that."""
INTERRUPTED = 128
"""Exit codes above this are of signals."""


class SweepOptions(NamedTuple):
    """How a sweep is run on this machine."""

    root: Path = Path("runs")
    name: str = "sweep"
    """The sweep's folder is ``ROOT/NAME``."""
    trials: int | None = None
    """Configurations in all, with those of former starts; None for all of a grid."""
    jobs: int = 1
    """Runs at the same time."""
    threads: int = 1
    """Threads of each run."""
    seed: int = 0
    """Of the draws of configurations."""

    @property
    def folder(self) -> Path:
        """The sweep's folder."""
        return self.root / self.name


class StoppedError(Exception):
    """A signal ended the sweep.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _OpenTrial:
    """A trial whose runs are not all at their end."""

    def __init__(
        self, trial: Trial, runs: dict[int | None, SweepRun], reported: Iterable[int]
    ) -> None:
        self.trial = trial
        self.reported = set(reported)
        """Environment steps of the first seed's values that the study has."""
        self.waiting = dict(runs)
        """Runs by seed that are not started."""
        self.running: dict[int | None, SweepRun] = {}
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.first_seed = next(iter(runs))
        self.is_pruned = False
        self.error: str | None = None


def run_sweep(
    sweep: SweepFile,
    options: SweepOptions,
    evaluation_every: int = 1,
    program: Sequence[str] = PROGRAM,
    say: Callable[[str], None] = print,
) -> Study:
    """Train configurations until there are as many as wanted, and return the study.

    Called again after a kill, it continues the interrupted runs from their checkpoints.

    Args:
        sweep: what the sweep file says.
        options: how it is run here.
        evaluation_every: environment steps between two evaluations, in which Hyperband counts.
        program: what starts a run.
        say: what prints a line.

    Raises:
        ConfigurationError: if the folder is in use or of another sweep, no run logs the metric, or
            the first trials all fail.
        StoppedError: if a signal ended it; the runs are saved by then.
    """
    check_name(options.name)
    ensure_writable(options.folder)
    with run_lock(options.folder), _signals_raise():
        study = Study(options.folder, sweep, options.seed, evaluation_every)
        _Runner(sweep, options, study, program, say).run()
    return study


class _Runner:
    """The loop of a sweep: one process, in which nothing waits for a run."""

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
        self._states = import_optuna().trial.TrialState
        self._open: list[_OpenTrial] = []
        self._has_seen_metric = False

    def run(self) -> None:
        """Run until all trials are finished."""
        for trial in self._study.interrupted_trials():
            one = self._opened(trial)
            self._open.append(one)
            what = "had ended early" if one.is_pruned else "was interrupted: it continues"
            self._say(f"trial {trial.number} {what}")
        try:
            while self._fill() or self._open:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                for one in list(self._open):
                    self._look_at(one)
        except BaseException:
            self._interrupt_all()
            raise

    def _fill(self) -> bool:
        """Start runs while there is room; return whether any was started."""
        was_started = False
        while sum(len(one.running) for one in self._open) < self._options.jobs:
            found = self._next_run()
            if found is None:
                break
            one, seed = found
            run = one.waiting.pop(seed)
            run.start()
            one.running[seed] = run
            was_started = True
            self._say(f"{self._described(one, seed)}: started{self._values_of(one)}")
        return was_started

    def _next_run(self) -> tuple[_OpenTrial, int | None] | None:
        """Return the trial and the seed of the next run; None if there is none."""
        for one in self._open:
            is_judged = self._sweep.hyperband is None or one.first_seed not in one.running
            if one.waiting and is_judged and not one.is_pruned and one.error is None:
                return one, next(iter(one.waiting))
        wanted = self._options.trials
        if wanted is not None and self._study.num_finished + len(self._open) >= wanted:
            return None
        trial = self._study.next_trial()
        if trial is None:
            return None
        self._open.append(self._opened(trial))
        return self._open[-1], self._open[-1].first_seed

    def _opened(self, trial: Trial) -> _OpenTrial:
        runs = {}
        for seed in self._sweep.seeds:
            runs[seed] = SweepRun(
                self._options.root,
                f"{self._options.name}/{run_name(trial.number, seed)}",
                self._sweep.arguments(trial.params, seed),
                self._options.threads,
                self._program,
            )
        (stored,) = (one for one in self._study.trials if one.number == trial.number)
        reported = stored.intermediate_values
        one = _OpenTrial(trial, runs, reported)
        # a kill may have come before its runs had ended, or before its last value was judged
        is_ended_early = bool(trial.user_attrs.get(ENDED_EARLY))
        if is_ended_early or (reported and self._is_weak(one)):
            self._end_early(one)
        for seed in list(runs):
            known = trial.user_attrs.get(f"{OUTCOME}{seed}")
            if known is not None:  # it ended before the sweep was killed
                one.outcomes[str(seed)] = known
                one.waiting.pop(seed)
        return one

    def _look_at(self, one: _OpenTrial) -> None:
        """Read what a trial's runs have logged, and end it where all are at their end."""
        for seed, run in list(one.running.items()):
            code = run.code  # before the metrics are read: else the last rows may be missed
            self._check_metric(run)
            if seed == one.first_seed and not one.is_pruned and code is None:
                self._judge(one, run)
            if code is not None:
                del one.running[seed]
                self._ended(one, seed, run, code)
        if not one.running and (not one.waiting or one.is_pruned or one.error is not None):
            self._finish(one)

    def _check_metric(self, run: SweepRun) -> None:
        """End the sweep as soon as an evaluation does not have its metric."""
        if self._has_seen_metric:
            return
        curves = run.curves()
        self._has_seen_metric = self._sweep.metric in curves
        is_wanted = is_evaluation(self._sweep.metric) and not self._has_seen_metric
        if is_wanted and any(is_evaluation(name) for name in curves):
            raise ConfigurationError(missing_metric(self._sweep.metric, curves))

    def _judge(self, one: _OpenTrial, run: SweepRun) -> None:
        """Report the first seed's curve, and end the trial if it is weak."""
        env_steps, values = finite(run.curves().get(self._sweep.metric, ([], [])))
        for step, value in zip(env_steps, values, strict=True):
            if step in one.reported:
                continue
            one.reported.add(step)
            one.trial.report(value, step)
            if self._is_weak(one):
                self._say(
                    f"{self._described(one, one.first_seed)}: ended early after {step:,} env steps,"
                    f" {self._sweep.metric} {value:.3f}"
                )
                self._end_early(one)
                return

    def _is_weak(self, one: _OpenTrial) -> bool:
        """Return whether Hyperband ends a trial at the last value that was reported."""
        return self._sweep.hyperband is not None and one.trial.should_prune()

    def _end_early(self, one: _OpenTrial) -> None:
        """Interrupt a trial's runs; a sweep that is killed before they end does not continue it."""
        one.is_pruned = True
        one.trial.set_user_attr(ENDED_EARLY, True)
        for run in one.running.values():
            run.interrupt()

    def _ended(self, one: _OpenTrial, seed: int | None, run: SweepRun, code: int) -> None:
        """Keep what a run came to that has ended."""
        if one.is_pruned or one.error is not None:
            return
        if code == 0:
            try:
                outcome = run.outcome(self._sweep.metric, self._sweep.is_maximized)
            except ConfigurationError as error:
                if not self._has_seen_metric:
                    raise
                one.error = str(error)  # in this run it was never finite
                self._say(f"{self._described(one, seed)} {one.error}; see {run.log}")
                return
            kept = outcome._asdict()
            one.outcomes[str(seed)] = kept
            one.trial.set_user_attr(f"{OUTCOME}{seed}", kept)
            self._say(f"{self._described(one, seed)}: {self._sweep.metric} {outcome.best:.3f}")
            return
        what = "was ended by a signal" if code < 0 or code > INTERRUPTED else "failed"
        one.error = f"{what} (exit code {code}): {run.failure()}"
        self._say(f"{self._described(one, seed)} {one.error}; see {run.log}")
        for other in one.running.values():
            other.interrupt()

    def _finish(self, one: _OpenTrial) -> None:
        self._open.remove(one)
        study = self._study.study
        if one.error is not None:
            one.trial.set_user_attr(ERROR, one.error)
            study.tell(one.trial, state=self._states.FAIL)
            self._check_failures()
        elif one.is_pruned:
            study.tell(one.trial, state=self._states.PRUNED)
        else:
            study.tell(one.trial, statistics.fmean(o["best"] for o in one.outcomes.values()))

    def _check_failures(self) -> None:
        finished = [trial for trial in self._study.trials if trial.state.is_finished()]
        if len(finished) == FAILURES_AT_START and all(ERROR in one.user_attrs for one in finished):
            raise ConfigurationError(
                f"the first {FAILURES_AT_START} trials failed, the last one: it"
                f" {finished[-1].user_attrs[ERROR]}. Correct the cause, delete"
                f" {self._options.folder} and start again"
            )

    def _interrupt_all(self) -> None:
        """Let all runs save and end."""
        running = [run for one in self._open for run in one.running.values()]
        for run in running:
            run.interrupt()
        for run in running:
            run.wait()

    def _described(self, one: _OpenTrial, seed: int | None) -> str:
        of_seed = "" if seed is None else f", seed {seed}"
        return f"trial {one.trial.number}{of_seed}"

    def _values_of(self, one: _OpenTrial) -> str:
        given = [f"{name}={value}" for name, value in one.trial.params.items()]
        return f" with {' '.join(given)}" if given else ""


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C raise ``StoppedError``; Python allows that in the main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        for one in former:
            signal.signal(one, signal.SIG_IGN)  # the runs are saving: a second one would lose them
        raise StoppedError(number)

    try:
        former = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:
        former = {}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
