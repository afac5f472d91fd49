"""The runs of a sweep as trials of Optuna's study, in a database that a killed sweep continues.

Every run is a trial: with ``S`` seeds, trial ``n`` is configuration ``n // S`` with seed ``n % S``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.sweeps.sweep_file import SweepFile, import_optuna

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

DATABASE = "sweep.db"
STUDY = "sweep"
"""The name of the study in the database."""
IDENTITY = "sweep_file"
"""The study's attribute with what must not change while a sweep is continued."""
MAY_CHANGE = ("path", "name", "run_cap")
"""Parts of a sweep file that may."""


def open_study(folder: Path, sweep: SweepFile, evaluation_every: int) -> Study:
    """Open or create a sweep's study, and let the trials that a kill interrupted wait for a start.

    The caller holds the lock of the folder.

    Args:
        folder: of the sweep.
        sweep: content of the sweep file.
        evaluation_every: environment steps between two evaluations, the unit of Hyperband.

    Raises:
        ConfigurationError: if the database cannot be read, or belongs to another sweep.
    """
    optuna = import_optuna()
    path = folder / DATABASE
    pruner = optuna.pruners.NopPruner()
    if sweep.min_iter is not None:
        pruner = optuna.pruners.SuccessiveHalvingPruner(
            min_resource=sweep.min_iter * evaluation_every, reduction_factor=sweep.eta
        )
    try:
        storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
        study = optuna.create_study(
            storage=storage,
            study_name=STUDY,
            direction="maximize" if sweep.is_maximized else "minimize",
            pruner=pruner,
            load_if_exists=True,
        )
        trials = study.get_trials(deepcopy=False)
    except Exception as error:  # SQLAlchemy's, Optuna's and JSON's, of several kinds
        raise ConfigurationError(
            f"{path} cannot be read as the database of a sweep ({error}): move it away, or give"
            " another --name"
        ) from error
    _check_identity(study, path, sweep)
    for trial in trials:
        if trial.state == optuna.trial.TrialState.RUNNING:
            trial_id = storage.get_trial_id_from_study_id_trial_number(
                storage.get_study_id_from_name(STUDY), trial.number
            )
            storage.set_trial_state_values(trial_id, optuna.trial.TrialState.WAITING)
    return study


def _check_identity(study: Study, path: Path, sweep: SweepFile) -> None:
    """Check that a study, with the values that become options, belongs to this sweep."""
    parts = sweep._asdict().items()
    here = {name: str(part) for name, part in parts if name not in MAY_CHANGE}
    there = study.user_attrs.get(IDENTITY)
    if there is None:
        study.set_user_attr(IDENTITY, here)
        there = here
    different = [name for name in here if here[name] != there.get(name)]
    different += [
        f"values of trial {trial.number}"
        for trial in study.get_trials(deepcopy=False)
        if trial.distributions.items() - sweep.parameters.items()
    ]
    if different:
        raise ConfigurationError(
            f"{path} belongs to another sweep, with other {', '.join(different)}. Give another"
            " --name to start a sweep of its own, or the sweep file and options with which this"
            " one was started"
        )


def next_trial(study: Study, sweep: SweepFile, trials: int | None) -> Trial | None:
    """Return the next trial with values of all parameters; None if there is none.

    Random numbers depend on the trial's number alone. So neither the order in which runs end nor a
    kill changes the configurations of a random search.

    Args:
        study: of the sweep.
        sweep: content of the sweep file.
        trials: configurations in all; None for all of a grid.
    """
    optuna = import_optuna()
    grid = sweep.grid[:trials] if sweep.method == "grid" else []
    num_seeds = len(sweep.seeds)
    limit = num_seeds * (len(grid) if trials is None or grid else trials)
    existing = study.get_trials(deepcopy=False)
    waiting = [one.number for one in existing if one.state == optuna.trial.TrialState.WAITING]
    number = min(waiting, default=len(existing))
    if not waiting:
        if number >= limit:
            return None
        index, place = divmod(number, num_seeds)
        if place > 0:
            study.enqueue_trial(existing[number - place].params)
        elif grid:
            study.enqueue_trial(grid[index])
    if sweep.method == "bayes":
        study.sampler = optuna.samplers.TPESampler(constant_liar=True, seed=number)
    else:
        study.sampler = optuna.samplers.RandomSampler(seed=number)
    return study.ask(sweep.parameters)
