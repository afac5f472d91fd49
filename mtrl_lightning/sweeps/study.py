"""The trials of a sweep in Optuna's database, which a killed sweep continues.

Every sample is seeded by the sweep's seed, the trial's number and the parameter's name. So neither
the order in which trials end nor an interruption changes the configurations of a random search.
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.sweeps.sweep_file import SweepFile, import_optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

DATABASE = "sweep.db"
STUDY = "sweep"
"""The name of the study in the database."""
IDENTITY = "sweep_file"
"""The study's attribute with the content of the sweep file."""
OUTCOME = "outcome_of_seed_"
"""A trial's attributes with the results of its runs begin with this."""
ERROR = "error"
"""A trial's attribute: why it failed."""
SECONDS_FOR_LOCK = 60
"""How long a write waits for another one to the database."""
STARTUP_TRIALS = 10
"""Trials that ``bayes`` samples at random before it models the results."""


class Outcome(NamedTuple):
    """The result of a run."""

    best: float
    """The metric's best value in the course of the run."""
    last: float
    env_steps: int
    """Environment steps at the best value."""
    per_task: dict[str, float]
    """The metric of each task at the best value; empty if it has no tasks."""


def outcomes_of(attributes: Mapping[str, Any]) -> list[Outcome]:
    """Return the results of a trial's runs, one for each seed that ended."""
    return [Outcome(**kept) for name, kept in attributes.items() if name.startswith(OUTCOME)]


def open_study(folder: Path, sweep: SweepFile, seed: int, evaluation_every: int) -> Study:
    """Open or create a sweep's study and check that it belongs to the sweep file.

    Args:
        folder: of the sweep.
        sweep: content of the sweep file.
        seed: of the samples.
        evaluation_every: environment steps between two evaluations, the unit of Hyperband.

    Raises:
        ConfigurationError: if the database is none, is damaged or belongs to another sweep.
    """
    path = folder / DATABASE
    try:
        study = _load(path, sweep, evaluation_every)
        _check_identity(study, path, {**sweep.identity(), "seed": seed})
        for trial in study.get_trials(deepcopy=False):
            _check_values(trial, sweep)
            outcomes_of(trial.user_attrs)
    except ConfigurationError:
        raise
    except Exception as error:  # SQLAlchemy's, Optuna's and JSON's, of several kinds
        if not path.exists():
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(
            f"{path} cannot be read as the database of a sweep ({reason}): move it away, or give"
            " another --name"
        ) from error
    return study


def _storage(path: Path) -> Any:
    return import_optuna().storages.RDBStorage(
        f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": SECONDS_FOR_LOCK}}
    )


def _load(path: Path, sweep: SweepFile, evaluation_every: int) -> Study:
    optuna = import_optuna()
    storage = _storage(path)
    others = [name for name in optuna.get_all_study_names(storage) if name != STUDY]
    if others:
        raise ConfigurationError(
            f"{path} is the database of other studies ({', '.join(others[:3])}): give another"
            " --name or --root"
        )
    pruner = optuna.pruners.NopPruner()
    if sweep.hyperband is not None:
        pruner = optuna.pruners.SuccessiveHalvingPruner(
            min_resource=sweep.hyperband.min_iter * evaluation_every,
            reduction_factor=sweep.hyperband.eta,
        )
    return optuna.create_study(
        storage=storage,
        study_name=STUDY,
        direction="maximize" if sweep.is_maximized else "minimize",
        pruner=pruner,
        load_if_exists=True,
    )


def _check_identity(study: Study, path: Path, here: dict[str, Any]) -> None:
    """Check that a study belongs to this sweep; one without an identity is new and gets it."""
    there = study.user_attrs.get(IDENTITY)
    if there is None:
        study.set_user_attr(IDENTITY, here)
        return
    differences = []
    for name in sorted(name for name in here if here[name] != there.get(name)):
        if name == "parameters":
            both = {*here[name], *there[name]}
            changed = sorted(one for one in both if here[name].get(one) != there[name].get(one))
            differences.append(f"parameters {', '.join(changed)}")
        else:
            differences.append(f"{name} {there.get(name)} there and {here[name]} here")
    if differences:
        raise ConfigurationError(
            f"{path} belongs to another sweep: {'; '.join(differences)}. Give another --name to"
            " start a sweep of its own, or the sweep file and options with which this one was"
            " started"
        )


def _check_values(trial: FrozenTrial, sweep: SweepFile) -> None:
    """Check that a trial of the database has values of the sweep file: they become options.

    Raises:
        ValueError: if a name or a value is not of the sweep file.
    """
    for name, value in trial.params.items():
        distribution: Any = sweep.parameters.get(name)
        if trial.distributions[name] != distribution:
            raise ValueError(f"trial {trial.number} has another distribution of {name}")
        if hasattr(distribution, "choices"):
            continue  # stored as an index
        is_end = any(math.isclose(value, end) for end in (distribution.low, distribution.high))
        if not (is_end or distribution.low <= value <= distribution.high):  # ends are rounded
            raise ValueError(f"trial {trial.number} has the value {value!r} of {name}")


def next_trial(study: Study, sweep: SweepFile, seed: int) -> Trial | None:
    """Return a new trial with values for all parameters; None if the grid is exhausted.

    Args:
        study: of the sweep.
        sweep: content of the sweep file.
        seed: of the samples.
    """
    if sweep.method == "grid" and len(study.get_trials(deepcopy=False)) >= len(sweep.grid):
        return None
    return _with_values(study.ask(), sweep, seed)


def interrupted_trials(study: Study, folder: Path, sweep: SweepFile, seed: int) -> list[Trial]:
    """Return the trials that a killed sweep left; this process must hold the sweep's lock.

    Args:
        study: of the sweep.
        folder: of the sweep.
        sweep: content of the sweep file.
        seed: of the samples.
    """
    optuna = import_optuna()
    storage = _storage(folder / DATABASE)
    study_id = storage.get_study_id_from_name(STUDY)
    trials = []
    for one in study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, one.number)
        trials.append(_with_values(optuna.Trial(study, trial_id), sweep, seed))
    return trials


def _with_values(trial: Trial, sweep: SweepFile, seed: int) -> Trial:
    """Give a trial the values that it lacks: a sweep may have been killed between two."""
    samplers = import_optuna().samplers
    grid = sweep.grid if sweep.method == "grid" else []
    for name, distribution in sweep.parameters.items():
        seed_of_value = zlib.crc32(f"{seed}/{trial.number}/{name}".encode())
        sampler = samplers.RandomSampler(seed_of_value)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*experimental.*")
            if sweep.method == "grid":
                # GridSampler shuffles, and ends the loop of `study.optimize`, which is not used
                values = grid[trial.number % len(grid)]
                sampler = samplers.PartialFixedSampler({name: values[name]}, sampler)
            elif sweep.method == "bayes":
                sampler = samplers.TPESampler(
                    n_startup_trials=STARTUP_TRIALS, constant_liar=True, seed=seed_of_value
                )
            trial.study.sampler = sampler
            _suggest(trial, name, distribution)
    return trial


def _suggest(trial: Trial, name: str, distribution: Any) -> None:
    """Let the trial sample a value, unless it has one."""
    if hasattr(distribution, "choices"):
        trial.suggest_categorical(name, distribution.choices)
        return
    suggest = trial.suggest_int if isinstance(distribution.low, int) else trial.suggest_float
    suggest(name, distribution.low, distribution.high, log=distribution.log, step=distribution.step)
