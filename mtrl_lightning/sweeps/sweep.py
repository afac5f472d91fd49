"""Run a sweep: its runs are trials of Optuna's study, in a database that a killed sweep continues.

No PyTorch.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from mtrl_lightning.errors import ConfigurationError, Interrupted
from mtrl_lightning.reports.metrics_file import METRICS, read_metrics
from mtrl_lightning.runs import check_idle, ensure_writable, run_lock, versions
from mtrl_lightning.sweeps.sweep_file import SweepFile, optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

DATABASE = "sweep.db"
STUDY = "sweep"
"""The name of the study in the database."""
IDENTITY = "sweep_file"
"""The study's attribute with the settings that must not change while a sweep is continued."""
PROGRAM = (sys.executable, "-P", "-m", "mtrl_lightning.sweeps.child")
"""The command of a run, without its arguments; -P: no file of the working directory hides one."""
SECONDS_BETWEEN_LOOKS = 0.3
"""How often the runs' metrics are read."""
SECONDS_TO_SAVE = 120.0
"""A run that was interrupted and has not ended after this time is killed."""
SUBMITTED_BY = "SLURM_NTASKS"
"""Lightning finds a SLURM job by it. The sweep is requeued, not each of its runs."""


def run_sweep(sweep: SweepFile, folder: Path, *, trials: int | None = None, jobs: int = 1) -> Study:
    """Train configurations until there are as many as asked for, and return Optuna's study.

    Called again after a kill, it continues the interrupted runs from their checkpoints.

    Args:
        sweep: content of the sweep file.
        folder: of the sweep.
        trials: runs in all, those of previous starts included; None for all of a grid.
        jobs: runs at the same time.

    Raises:
        ConfigurationError: if the folder is in use or of another sweep.
        Interrupted: if a signal ended it; the runs are saved by then.
    """
    ensure_writable(folder)
    choosing = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with choosing:
                trial = next_trial(study, sweep, trials)
            if trial is None:
                return
            try:
                _run(trial, sweep, folder, stop)
            except BaseException:
                stop.set()
                raise

    with run_lock(folder), _interrupted_by_signals(stop), ThreadPoolExecutor(jobs) as workers:
        study = open_study(folder, sweep)
        for worker in [workers.submit(work) for _ in range(jobs)]:
            worker.result()
    return study


def open_study(folder: Path, sweep: SweepFile) -> Study:
    """Open or create a sweep's study, and let the trials that a kill interrupted wait for a start.

    The caller holds the lock of the folder.

    Raises:
        ConfigurationError: if the database cannot be read, or belongs to another sweep.
    """
    path = folder / DATABASE
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        study = optuna.create_study(
            storage=storage,
            study_name=STUDY,
            direction=sweep.goal,
            pruner=sweep.pruner,
            load_if_exists=True,
        )
        trials = study.get_trials(deepcopy=False)
    except Exception as error:  # SQLAlchemy's, Optuna's and JSON's, of several kinds
        raise ConfigurationError(
            f"{path} cannot be read as the database of a sweep ({error}): move it away, or give"
            " another --name"
        ) from error
    there = study.user_attrs.get(IDENTITY, sweep.identity)
    different = [name for name, one in sweep.identity.items() if one != there.get(name)]
    different += [
        f"values of trial {trial.number}"  # they become options of runs
        for trial in trials
        if trial.distributions.items() - sweep.parameters.items()
    ]
    if different:
        raise ConfigurationError(
            f"{path} belongs to another sweep, with other {', '.join(different)}. Give another"
            " --name to start a sweep of its own, or the sweep file and options with which this"
            " one was started"
        )
    study.set_user_attr(IDENTITY, sweep.identity)
    for trial in trials:
        if trial.state == optuna.trial.TrialState.RUNNING:
            trial_id = storage.get_trial_id_from_study_id_trial_number(
                storage.get_study_id_from_name(STUDY), trial.number
            )
            storage.set_trial_state_values(trial_id, optuna.trial.TrialState.WAITING)
    return study


def next_trial(study: Study, sweep: SweepFile, trials: int | None) -> Trial | None:
    """Return the next trial with values of all parameters; None if there is none.

    Random numbers depend on the trial's number alone. So neither the order in which runs end nor a
    kill changes the configurations of a random search.

    Args:
        study: of the sweep.
        sweep: content of the sweep file.
        trials: runs in all; None for all of a grid.
    """
    existing = study.get_trials(deepcopy=False)
    waiting = [one.number for one in existing if one.state == optuna.trial.TrialState.WAITING]
    index = min(waiting, default=len(existing))
    limit = len(sweep.grid[:trials]) if sweep.grid or trials is None else trials
    if not waiting and index >= limit:
        return None
    if sweep.grid and not waiting:
        study.enqueue_trial(sweep.grid[index])
    if sweep.method == "bayes":
        study.sampler = optuna.samplers.TPESampler(constant_liar=True, seed=index)
    else:
        study.sampler = optuna.samplers.RandomSampler(seed=index)
    return study.ask(sweep.parameters)


def _run(trial: Trial, sweep: SweepFile, folder: Path, stop: threading.Event) -> None:
    """Train one configuration in a process of its own, and store its result.

    Args:
        trial: with its values.
        sweep: content of the sweep file.
        folder: of the sweep.
        stop: lets the run save and end, and the trial without a result for the next start.
    """
    name = f"trial_{trial.number:04d}"
    folders = versions(str(folder), name)
    for one in folders:
        check_idle(one)  # a killed sweep's run may still be saving its checkpoint
    command = [*PROGRAM, *sweep.arguments(trial.params), f"--root={folder}", f"--name={name}"]
    command.append("--trainer.enable_progress_bar=false")
    if any((one / "checkpoints" / "last.ckpt").is_file() for one in folders):
        command.append("--ckpt_path=last")
    values = [f"{option}={value}" for option, value in trial.params.items()]
    print(f"{name}: {'continues' if folders else 'started'} {' '.join(values)}", flush=True)
    log = folder / f"{name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # closed by the kernel when the sweep is killed
            stdout=output,
            stderr=output,
            env={key: value for key, value in os.environ.items() if key != SUBMITTED_BY},
            start_new_session=True,  # Ctrl-C in a terminal reaches the sweep alone
        )
    try:
        code, curve, is_weak = _follow(process, trial, sweep, folder / name, stop)
    finally:
        process.terminate()  # it saves and ends
        try:
            process.wait(SECONDS_TO_SAVE)
        except subprocess.TimeoutExpired:
            process.kill()
    states = optuna.trial.TrialState
    if is_weak:
        trial.study.tell(trial, state=states.PRUNED)
        print(f"{name}: ended early after {len(curve)} evaluations", flush=True)
    elif code == 0 and curve:
        best = max(curve) if sweep.goal == "maximize" else min(curve)
        trial.study.tell(trial, best)
        print(f"{name}: {sweep.metric} {best:.3f}", flush=True)
    elif code is not None:
        trial.study.tell(trial, state=states.FAIL)
        lines = log.read_text(errors="replace").splitlines()
        error = next((line for line in lines if line.startswith("error:")), f"exit code {code}")
        if code == 0:
            error = f"it logged no {sweep.metric}"
        print(f"{name}: failed ({error}); see {log}", flush=True)


def _follow(
    process: subprocess.Popen[bytes],
    trial: Trial,
    sweep: SweepFile,
    folder: Path,
    stop: threading.Event,
) -> tuple[int | None, list[float], bool]:
    """Report the metric until the run ends, is weak, or has to stop.

    Returns:
        The run's exit code, None if it continues; the metric; and whether Hyperband ends the run.
    """
    stored = trial.study.get_trials(deepcopy=False)[trial.number]
    num_reported = len(stored.intermediate_values)
    curve: list[float] = []
    read_at = 0
    code = None
    while code is None and not stop.wait(SECONDS_BETWEEN_LOOKS):
        code = process.poll()  # before the metrics are read: else the last may be missed
        # not written yet, or damaged: what was read before is kept
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            path = versions(str(folder.parent), folder.name)[-1] / METRICS
            written_at = path.stat().st_mtime_ns
            if written_at != read_at:
                curve = list(filter(math.isfinite, read_metrics(path)[sweep.metric][1]))
                read_at = written_at
        for value in curve[num_reported:]:
            num_reported += 1
            trial.report(value, num_reported)
            if code is None and trial.should_prune():
                return None, curve[:num_reported], True
    return code, curve, False


@contextlib.contextmanager
def _interrupted_by_signals(stop: threading.Event) -> Iterator[None]:
    """Let SIGTERM and Ctrl-C raise ``Interrupted``, and set ``stop``."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in previous:
            signal.signal(one, signal.SIG_IGN)  # the runs are saving: a second one would lose them
        stop.set()
        raise Interrupted(128 + number)

    previous = {one: signal.signal(one, interrupt) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
