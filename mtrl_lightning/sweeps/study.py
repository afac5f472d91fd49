"""The trials of a sweep in Optuna's database, which a killed sweep continues. No PyTorch.

Every draw is seeded by the sweep's seed, the trial's number and the parameter's name. So neither
the order in which trials end nor an interruption changes what a random search tries.
"""

from __future__ import annotations

import logging
import math
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl_lightning.errors import ConfigurationError, import_optional
from mtrl_lightning.reports.metrics_file import MAX_ENV_STEPS
from mtrl_lightning.sweeps.runs import Outcome
from mtrl_lightning.sweeps.sweep_file import Parameter, SweepFile, Value

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial, Trial

DATABASE = "sweep.db"
STUDY = "sweep"
"""The name of the study in the database."""
IDENTITY = "sweep_file"
"""The study's attribute that holds what the sweep file said."""
OUTCOME = "outcome_of_seed_"
"""What a trial's attributes begin with that hold what its runs came to."""
ERROR = "error"
"""A trial's attribute that says why it failed."""
SECONDS_FOR_LOCK = 60
"""How long a write waits for another one to the database."""
STARTUP_TRIALS = 10
"""Trials that ``bayes`` draws at random before it models the results."""


def import_optuna() -> Any:
    """Import Optuna.

    Raises:
        ConfigurationError: if it is not installed.
    """
    optuna = import_optional("optuna", '"mtrl_lightning[sweep]"')
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna


class Study:
    """A sweep's trials and how the next one is chosen.

    Args:
        folder: of the sweep; its database is ``sweep.db``.
        sweep: what the sweep file says.
        seed: of the draws.
        evaluation_every: environment steps between two evaluations, in which Hyperband counts.

    Raises:
        ConfigurationError: if the database is none, or of another sweep.
    """

    def __init__(self, folder: Path, sweep: SweepFile, seed: int, evaluation_every: int) -> None:
        self._optuna = import_optuna()
        self._sweep = sweep
        self._seed = seed
        self.path = folder / DATABASE
        with self._damage_is_named():
            self.study: optuna.Study = self._open(evaluation_every)
            self._check_identity()
            if (self.study.direction.name == "MAXIMIZE") != sweep.is_maximized:
                raise ValueError(f"its direction is {self.study.direction.name}")
            for index, trial in enumerate(self.trials):
                wrong = _what_is_wrong(trial, index, sweep)
                if wrong is not None:
                    raise ValueError(f"trial {index} {wrong}")

    def _open(self, evaluation_every: int) -> optuna.Study:
        optuna = self._optuna
        pruner: Any = optuna.pruners.NopPruner()
        hyperband = self._sweep.hyperband
        if hyperband is not None:
            pruner = optuna.pruners.SuccessiveHalvingPruner(
                min_resource=hyperband.min_iter * evaluation_every, reduction_factor=hyperband.eta
            )
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{self.path}",
            engine_kwargs={"connect_args": {"timeout": SECONDS_FOR_LOCK}},
        )
        others = [name for name in optuna.get_all_study_names(storage) if name != STUDY]
        if others:
            raise ConfigurationError(
                f"{self.path} is the database of other studies ({', '.join(others[:3])}):"
                " give another --name or --root"
            )
        return optuna.create_study(
            storage=storage,
            study_name=STUDY,
            direction="maximize" if self._sweep.is_maximized else "minimize",
            pruner=pruner,
            load_if_exists=True,
        )

    @contextmanager
    def _damage_is_named(self) -> Iterator[None]:
        """Turn an error of reading the database into one that says what to do."""
        try:
            yield
        except ConfigurationError:
            raise
        except Exception as error:  # SQLAlchemy's, Optuna's and JSON's, of several kinds
            if not self.path.exists():
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigurationError(
                f"{self.path} cannot be read as the database of a sweep"
                f" ({reason}): move it away, or give another --name"
            ) from error

    def _check_identity(self) -> None:
        here = {**self._sweep.identity(), "seed": self._seed}
        there = self.study.user_attrs.get(IDENTITY)
        if there is None:
            self.study.set_user_attr(IDENTITY, here)
            return
        differing = sorted(name for name in here if here[name] != there.get(name))
        if differing:
            described = "; ".join(
                _difference(name, there.get(name), here[name]) for name in differing
            )
            raise ConfigurationError(
                f"{self.path} belongs to another sweep: {described}. Give another --name to start a"
                " sweep of its own, or the sweep file and options with which this one was started"
            )

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, by number."""
        return self.study.get_trials(deepcopy=False)

    @property
    def num_finished(self) -> int:
        """Trials that are complete, pruned or failed."""
        return sum(trial.state.is_finished() for trial in self.trials)

    def interrupted_trials(self) -> list[Trial]:
        """Return the trials that a killed sweep left; this process must hold the sweep's lock."""
        running = self._optuna.trial.TrialState.RUNNING
        trials = [one for one in self.trials if one.state == running]
        with self._damage_is_named():
            return [
                self._with_values(self._optuna.Trial(self.study, one._trial_id)) for one in trials
            ]

    def next_trial(self) -> Trial | None:
        """Return a new trial with values for all parameters; None if the grid is at its end."""
        if self._sweep.method == "grid" and len(self.trials) >= len(self._sweep.grid):
            return None
        return self._with_values(self.study.ask())

    def _with_values(self, trial: Trial) -> Trial:
        """Give a trial the values that it lacks: a sweep may have been killed between two."""
        for parameter in self._sweep.parameters:
            with _without_experimental_warnings():
                self.study.sampler = self._sampler(trial.number, parameter)
                _suggest(trial, parameter)
        return trial

    def _sampler(self, number: int, parameter: Parameter) -> Any:
        samplers = self._optuna.samplers
        seed = zlib.crc32(f"{self._seed}/{number}/{parameter.name}".encode())
        if self._sweep.method == "grid":
            grid = self._sweep.grid
            fixed = {parameter.name: grid[number % len(grid)][parameter.name]}
            return samplers.PartialFixedSampler(fixed, samplers.RandomSampler(seed))
        if self._sweep.method == "random":
            return samplers.RandomSampler(seed)
        return samplers.TPESampler(
            n_startup_trials=STARTUP_TRIALS, multivariate=False, constant_liar=True, seed=seed
        )


def outcomes_of(attributes: Mapping[str, Any]) -> list[Outcome]:
    """Return what the runs of a trial came to, one for each seed that ended.

    Args:
        attributes: of the trial.
    """
    return [Outcome(**kept) for name, kept in attributes.items() if name.startswith(OUTCOME)]


def _what_is_wrong(trial: FrozenTrial, index: int, sweep: SweepFile) -> str | None:
    """Return why a trial of the database is none of this sweep; None if it is one.

    Its values become options of a command, and what its runs came to is shown.
    """
    parameters = {one.name: one for one in sweep.parameters}
    for name, value in trial.params.items():
        if name not in parameters or not parameters[name].allows(value):
            return f"has the value {value!r} of {name}"
        if trial.distributions[name] != _distribution(parameters[name]):
            return f"has another distribution of {name}"
    if trial.state.name == "WAITING":
        return "waits with values that this program has not chosen"
    is_whole = trial.value is not None and set(trial.params) == set(parameters)
    if trial.state.name == "COMPLETE" and not is_whole:
        return "is complete and lacks its result or a value"
    outcomes = outcomes_of(trial.user_attrs)
    numbers = [
        *(trial.values or ()),
        *trial.intermediate_values.values(),
        *trial.system_attrs.values(),  # of Hyperband
        *(number for one in outcomes for number in (one.best, one.last, *one.per_task.values())),
    ]
    counts = [trial.number, *trial.intermediate_values, *(one.env_steps for one in outcomes)]
    seeds = {name.removeprefix(OUTCOME) for name in trial.user_attrs if name.startswith(OUTCOME)}
    if (
        not all(isinstance(one, (int, float)) and math.isfinite(one) for one in numbers)
        or not all(isinstance(one, int) and 0 <= one <= MAX_ENV_STEPS for one in counts)
        or not isinstance(trial.user_attrs.get(ERROR, ""), str)
        or not seeds <= {str(seed) for seed in sweep.seeds}
        or trial.number != index
    ):
        return f"has the attributes {trial.user_attrs}, number {trial.number}"
    return None


def _difference(name: str, there: Any, here: Any) -> str:
    """Return in what a part of two sweep files differs; of parameters, the names of those."""
    if not isinstance(there, dict) or not isinstance(here, dict):
        return f"{name} {there} there and {here} here"
    changed = sorted(key for key in {*there, *here} if there.get(key) != here.get(key))
    return f"{name} {', '.join(changed)}"


@contextmanager
def _without_experimental_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*experimental.*")
        yield


def _distribution(parameter: Parameter) -> Any:
    """Return the distribution that Optuna stores of a parameter."""
    distributions = import_optuna().distributions
    if parameter.choices:
        return distributions.CategoricalDistribution(parameter.choices)
    if parameter.kind is int:
        return distributions.IntDistribution(int(parameter.low), int(parameter.high))
    return distributions.FloatDistribution(
        parameter.low, parameter.high, log=parameter.is_log, step=parameter.step
    )


def _suggest(trial: Trial, parameter: Parameter) -> Value:
    """Return the trial's value of a parameter; it is drawn if the trial has none."""
    if parameter.choices:
        value: Any = trial.suggest_categorical(parameter.name, list(parameter.choices))
        return value
    if parameter.kind is int:
        return trial.suggest_int(parameter.name, int(parameter.low), int(parameter.high))
    return trial.suggest_float(
        parameter.name,
        parameter.low,
        parameter.high,
        log=parameter.is_log,
        step=parameter.step,
    )
