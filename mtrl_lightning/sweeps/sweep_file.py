"""A sweep file in W&B's format: parameters with their distributions, and the command of a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from mtrl_lightning.checks import at_least, one_of
from mtrl_lightning.errors import ConfigurationError, import_optional

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = str | int | float | bool | None
"""A parameter's value, as Optuna stores it; its text is given on the command line."""

SEED = "seed_everything"
"""The parameter whose values are the seeds of every configuration."""
ARGS = "${args}"
"""Where the parameters are inserted in the command."""
METHODS = ("grid", "random", "bayes")
NEEDED = {"method": str, "metric": dict, "parameters": dict, "command": list}
"""Keys that a sweep file must have, and their types."""
OPTIONAL = ("description", "early_terminate", "entity", "name", "program", "project", "run_cap")
EXAMPLE = "see configs/sweep, or mtrl-lightning list sweep"
DISTRIBUTIONS = {
    "constant": {"value"},
    "categorical": {"values"},
    "uniform": {"min", "max"},
    "q_uniform": {"min", "max", "q"},
    "log_uniform_values": {"min", "max"},
    "int_uniform": {"min", "max"},
}
"""Distributions of W&B that are understood here, and the keys of each."""
WANDB_LOGGER = ("logger/wandb", "logger/wandb.yaml")
"""The configuration that is left out of the command: there is no account here."""
DEFAULT_ETA = 3


def import_optuna() -> Any:
    """Import Optuna.

    Raises:
        ConfigurationError: if it is not installed.
    """
    optuna = import_optional("optuna", '"mtrl_lightning[sweep]"')
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class SweepFile(NamedTuple):
    """The content of a sweep file."""

    path: Path
    name: str
    method: str
    """How configurations are chosen: ``grid``, ``random`` or ``bayes``."""
    metric: str
    is_maximized: bool
    options: dict[str, str]
    """The options of ``fit`` by the short names of the parameters."""
    parameters: dict[str, BaseDistribution]
    """Optuna's distributions by the short names."""
    seeds: tuple[int | None, ...]
    """Seeds of every configuration; None for the command's own."""
    command: tuple[str, ...]
    """The arguments of the program, with ``${args}`` where the parameters are inserted."""
    run_cap: int | None
    min_iter: int | None
    """Evaluations before the first decision about an early end; None for no early ends."""
    eta: int
    """One run in this many continues; evaluations between decisions grow by this factor."""

    @property
    def grid(self) -> list[dict[str, Value]]:
        """All combinations of the choices, in the order of the file."""
        choices = itertools.product(*map(_corners, self.parameters.values()))
        return [dict(zip(self.parameters, values, strict=True)) for values in choices]

    @property
    def corners(self) -> list[dict[str, Value]]:
        """Few configurations that together have every choice and the ends of every range."""
        values = {name: _corners(one) for name, one in self.parameters.items()}
        number = max(map(len, values.values()), default=1)
        return [{name: one[k % len(one)] for name, one in values.items()} for k in range(number)]

    def arguments(self, values: Mapping[str, Value], seed: int | None = None) -> list[str]:
        """Return the arguments of the program for one configuration, beginning with ``fit``.

        Args:
            values: of the parameters, by short name.
            seed: of the run; None for the command's own.
        """
        options = [f"--{self.options[name]}={value}" for name, value in values.items()]
        seed_option = [] if seed is None else [f"--{SEED}={seed}"]
        index = self.command.index(ARGS)
        return [*self.command[:index], *options, *self.command[index + 1 :], *seed_option]


def _corners(distribution: Any) -> tuple[Value, ...]:
    """Return all choices of a parameter, or the two ends of its range."""
    choices = getattr(distribution, "choices", None)
    return choices or (distribution.low, distribution.high)


def read_sweep_file(path: Path, options: tuple[str, ...] = ()) -> SweepFile:
    """Read a sweep file.

    Args:
        path: a YAML file in the format of W&B.
        options: of ``fit``, added to every run.

    Raises:
        ConfigurationError: if the file cannot be read or a part of it is not understood here; with
            what to write instead.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"the sweep file {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} is no sweep file: {EXAMPLE}")
    for key, kind in NEEDED.items():
        if not content.get(key) or not isinstance(content[key], kind):
            raise ConfigurationError(f"{path}: {key} is {content.get(key)!r}: {EXAMPLE}")
    unknown = sorted(map(str, content.keys() - NEEDED.keys() - set(OPTIONAL)))
    if unknown:
        raise ConfigurationError(
            f"{path}: {', '.join(unknown)} is not understood; a sweep file has"
            f" {', '.join([*NEEDED, *OPTIONAL])}"
        )
    one_of(METHODS, method=content["method"], prefix=f"{path}: ")
    metric = content["metric"]
    if not isinstance(metric.get("name"), str):
        raise ConfigurationError(
            f"{path}: metric is {metric!r}: give {{name: eval/success, goal: maximize}}"
        )
    goal = metric.get("goal", "minimize")
    one_of(("maximize", "minimize"), goal=goal, prefix=f"{path}: metric.")
    run_cap = content.get("run_cap")
    at_least(1, run_cap=run_cap, prefix=f"{path}: ")
    min_iter, eta = _hyperband(path, content.get("early_terminate"))
    entries = content["parameters"]
    seeds = _seeds(path, entries.get(SEED))
    names = {_short(name): name for name in entries if name != SEED}
    parameters = {
        short: _distribution(f"{path}: parameter {name}", entries[name])
        for short, name in names.items()
    }
    ranges = [names[short] for short, one in parameters.items() if not hasattr(one, "choices")]
    if content["method"] == "grid" and ranges:
        raise ConfigurationError(
            f"{path}: a grid needs values for {', '.join(ranges)}: give values: [...], or method:"
            " random"
        )
    return SweepFile(
        path=path,
        name=str(content.get("name", path.stem)),
        method=content["method"],
        metric=metric["name"],
        is_maximized=goal == "maximize",
        options=names,
        parameters=parameters,
        seeds=seeds,
        command=_command(path, content["command"], options),
        run_cap=run_cap,
        min_iter=min_iter,
        eta=eta,
    )


def _short(name: str) -> str:
    """Return an option's name as it stands in tables and plots."""
    return name.replace("init_args.", "").removeprefix("model.")


def _distribution(where: str, entry: Any) -> Any:
    """Return Optuna's distribution of one parameter.

    Args:
        where: the file and the parameter, for messages.
        entry: of the file.
    """
    if not isinstance(entry, dict) or "parameters" in entry:
        raise ConfigurationError(
            f"{where} is {entry!r}: give {{values: [...]}} or min and max. A dictionary of"
            " parameters is not understood: give each its full name, such as model.init_args.tau"
        )
    name: Any = entry.get("distribution", _default_distribution(entry))
    one_of(DISTRIBUTIONS, distribution=name, prefix=f"{where}: ", hint="; others need W&B")
    if entry.keys() - {"distribution"} != DISTRIBUTIONS[name]:
        raise ConfigurationError(
            f"{where} is {entry!r}: give values, value, or min and max. The distribution {name} has"
            f" {', '.join(sorted(DISTRIBUTIONS[name]))}, and nothing else has an effect here"
        )
    is_whole = name == "int_uniform"
    for key in DISTRIBUTIONS[name] & {"min", "max", "q"}:
        if type(entry[key]) not in ((int,) if is_whole else (int, float)):
            raise ConfigurationError(
                f"{where}: {key} is {entry[key]!r}: give {'int' if is_whole else 'int or float'}"
                " (YAML takes 1e-4 for a text, 1.0e-4 for a number)"
            )
    optuna = import_optuna().distributions
    try:
        if "min" not in entry:
            values = entry["values"] if "values" in entry else [entry["value"]]
            return optuna.CategoricalDistribution([_scalar(value) for value in values])
        if is_whole:
            return optuna.IntDistribution(entry["min"], entry["max"])
        is_log = name == "log_uniform_values"
        return optuna.FloatDistribution(entry["min"], entry["max"], is_log, entry.get("q"))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{where} is {entry!r}: {error}") from error


def _default_distribution(entry: dict[str, Any]) -> str:
    """Return the distribution that W&B takes for an entry that does not name one."""
    if "value" in entry:
        return "constant"
    if "values" in entry:
        return "categorical"
    are_whole = all(isinstance(entry.get(bound), int) for bound in ("min", "max"))
    return "int_uniform" if are_whole else "uniform"


def _scalar(value: Any) -> Value:
    """Return a value of the file; a list or a dictionary as the text that ``fit`` takes."""
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _seeds(path: Path, entry: Any) -> tuple[int | None, ...]:
    """Return the seeds of every configuration."""
    if entry is None:
        return (None,)
    seeds = getattr(_distribution(f"{path}: parameter {SEED}", entry), "choices", ())
    if not seeds or not all(type(seed) is int for seed in seeds):
        raise ConfigurationError(
            f"{path}: {SEED} is {entry!r}: give values: [1, 2, 3], the seeds of every configuration"
        )
    return seeds


def _command(path: Path, entry: list[Any], options: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of the program, without W&B's logger and with ``options``."""
    kept: list[str] = []
    for word in map(str, entry):
        if not word.endswith(WANDB_LOGGER):
            kept.append(word)
        elif kept and kept[-1] in ("-c", "--config"):
            kept.pop()
    arguments = kept[kept.index("fit") :] if "fit" in kept else []
    macros = [word for word in arguments if "${" in word]
    if macros != [ARGS]:
        raise ConfigurationError(
            f"{path}: command is {entry!r}: give a list with fit, its configurations and options,"
            f' and "{ARGS}" once, where the parameters are inserted. No other macro is replaced'
            " behind fit"
        )
    index = arguments.index(ARGS)
    return (*arguments[:index], *options, *arguments[index:])


def _hyperband(path: Path, entry: Any) -> tuple[int | None, int]:
    """Return ``min_iter`` and ``eta``."""
    if entry is None:
        return None, DEFAULT_ETA
    found = {"eta": DEFAULT_ETA, **entry} if isinstance(entry, dict) else {}
    are_whole = type(found.get("min_iter")) is int and type(found["eta"]) is int
    if found.get("type") != "hyperband" or not are_whole:
        raise ConfigurationError(
            f"{path}: early_terminate is {entry!r}: give {{type: hyperband, min_iter: 3, eta: 3}}"
        )
    at_least(1, min_iter=found["min_iter"], prefix=f"{path}: early_terminate.")
    at_least(2, eta=found["eta"], prefix=f"{path}: early_terminate.")
    return found["min_iter"], found["eta"]
