"""A sweep file in W&B's format: parameters with their distributions, and the command of a run."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from mtrl_lightning.checks import at_least, one_of
from mtrl_lightning.errors import ConfigurationError, import_optional

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Value = str | int | float | bool
"""A parameter's value, as Optuna stores it; its text is given on the command line."""

SEED = "seed_everything"
"""The parameter whose values are the seeds of every configuration."""
METHODS = ("grid", "random", "bayes")
KEYS = (
    "command",
    "description",
    "early_terminate",
    "entity",
    "method",
    "metric",
    "name",
    "parameters",
    "program",
    "project",
    "run_cap",
)
"""Keys of a sweep file that are understood here."""
DISTRIBUTIONS = {
    "constant": {"value"},
    "categorical": {"values"},
    "uniform": {"min", "max"},
    "q_uniform": {"min", "max", "q"},
    "log_uniform": {"min", "max"},
    "log_uniform_values": {"min", "max"},
    "int_uniform": {"min", "max"},
}
"""Distributions of W&B that are understood here, and the keys of each."""
WANDB_LOGGER = re.compile(r"(.*[/=\\])?logger[/\\]wandb(\.yaml)?")
"""The configuration that is left out of the command: there is no account here."""
VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
DEFAULT_ETA = 3


def import_optuna() -> Any:
    """Import Optuna.

    Raises:
        ConfigurationError: if it is not installed.
    """
    optuna = import_optional("optuna", '"mtrl_lightning[sweep]"')
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Hyperband(NamedTuple):
    """When weak runs end early."""

    min_iter: int
    """Evaluations before the first decision."""
    eta: int
    """One run in this many continues; evaluations between decisions grow by this factor."""


class SweepFile(NamedTuple):
    """The content of a sweep file."""

    path: Path
    name: str
    method: str
    """How configurations are chosen: ``grid``, ``random`` or ``bayes``."""
    metric: str
    is_maximized: bool
    parameters: dict[str, BaseDistribution]
    """Optuna's distributions by the names of the options."""
    seeds: tuple[int | None, ...]
    """Seeds of every configuration; None for the command's own."""
    command: tuple[str, ...]
    """The arguments of the program, with ``${args}`` where the parameters are inserted."""
    hyperband: Hyperband | None
    run_cap: int | None
    has_target: bool
    """Whether the file has ``metric.target``, which ends a sweep of W&B and not this one."""

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

    def identity(self) -> dict[str, Any]:
        """Return what must not change while a sweep is continued, as plain values."""
        to_json = import_optuna().distributions.distribution_to_json
        parts = self._asdict()
        for name in ("path", "name", "run_cap", "has_target"):
            del parts[name]
        parts["parameters"] = {name: to_json(one) for name, one in self.parameters.items()}
        return json.loads(json.dumps(parts))

    def arguments(self, values: Mapping[str, Value], seed: int | None = None) -> list[str]:
        """Return the arguments of the program for one configuration, beginning with ``fit``.

        Args:
            values: of the parameters, by name.
            seed: of the run; None for the command's own.
        """
        options = [f"--{name}={value}" for name, value in values.items()]
        seed_option = [] if seed is None else [f"--{SEED}={seed}"]
        index = self.command.index("${args}")
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
    if not isinstance(content, dict) or "parameters" not in content:
        raise ConfigurationError(
            f"{path} is no sweep file, which has method, metric, parameters and command:"
            " see configs/sweep, or mtrl-lightning list sweep"
        )
    unknown = sorted(map(str, content.keys() - set(KEYS)))
    if unknown:
        raise ConfigurationError(
            f"{path}: {', '.join(unknown)} is not understood; a sweep file has {', '.join(KEYS)}"
        )
    method: Any = content.get("method")
    one_of(METHODS, method=method, prefix=f"{path}: ")
    metric = content.get("metric")
    if not isinstance(metric, dict) or not isinstance(metric.get("name"), str):
        raise ConfigurationError(
            f"{path}: metric is {metric!r}: give {{name: eval/success, goal: maximize}}"
        )
    goal = metric.get("goal", "minimize")
    one_of(("maximize", "minimize"), goal=goal, prefix=f"{path}: metric.")
    run_cap = content.get("run_cap")
    at_least(1, run_cap=run_cap, prefix=f"{path}: ")
    entries = content["parameters"]
    if not isinstance(entries, dict) or not entries:
        raise ConfigurationError(f"{path}: parameters is {entries!r}: give options of fit by name")
    parameters = {
        name: _distribution(f"{path}: parameter {name}", entry)
        for name, entry in entries.items()
        if name != SEED
    }
    ranges = [name for name, one in parameters.items() if not hasattr(one, "choices")]
    if method == "grid" and ranges:
        raise ConfigurationError(
            f"{path}: a grid needs values for {', '.join(ranges)}: give values: [...], or method:"
            " random"
        )
    return SweepFile(
        path=path,
        name=str(content.get("name", path.stem)),
        method=method,
        metric=metric["name"],
        is_maximized=goal == "maximize",
        parameters=parameters,
        seeds=_seeds(path, entries.get(SEED)),
        command=_command(path, content.get("command"), options),
        hyperband=_hyperband(path, content.get("early_terminate")),
        run_cap=run_cap,
        has_target="target" in metric,
    )


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
    entry = {**({"q": 1} if name == "q_uniform" else {}), **entry}
    if entry.keys() - {"distribution"} != DISTRIBUTIONS[name]:
        raise ConfigurationError(
            f"{where} is {entry!r}: give values, value, or min and max. The distribution {name} has"
            f" {', '.join(sorted(DISTRIBUTIONS[name]))}, and nothing else has an effect here"
        )
    if "min" in entry:
        return _range(where, name, entry)
    values = entry["values"] if "values" in entry else [entry["value"]]
    if not isinstance(values, list) or not values:
        raise ConfigurationError(f"{where}: values is {values!r}: give a list")
    choices = [_value(where, value) for value in values]
    return import_optuna().distributions.CategoricalDistribution(choices)


def _default_distribution(entry: dict[str, Any]) -> str:
    """Return the distribution that W&B takes for an entry that does not name one."""
    if "value" in entry:
        return "constant"
    if "values" in entry:
        return "categorical"
    are_whole = all(isinstance(entry.get(bound), int) for bound in ("min", "max"))
    return "int_uniform" if are_whole else "uniform"


def _range(where: str, name: str, entry: dict[str, Any]) -> Any:
    """Return Optuna's distribution between two numbers; ``name`` is W&B's."""
    optuna = import_optuna().distributions
    kinds = (int,) if name == "int_uniform" else (int, float)
    for key, value in entry.items():
        if key != "distribution" and type(value) not in kinds:
            raise ConfigurationError(
                f"{where}: {key} is {value!r}: give {' or '.join(one.__name__ for one in kinds)}"
                " (YAML takes 1e-4 for a text, 1.0e-4 for a number)"
            )
    low = entry["min"]
    high = entry["max"]
    if name == "log_uniform":  # its bounds are natural logarithms
        low = math.exp(low)
        high = math.exp(high)
    try:
        if name == "int_uniform":
            return optuna.IntDistribution(low, high)
        is_log = name.startswith("log_")
        return optuna.FloatDistribution(low, high, log=is_log, step=entry.get("q"))
    except ValueError as error:
        raise ConfigurationError(f"{where}: min is {low} and max {high}: {error}") from error


def _value(where: str, value: Any) -> Value:
    """Return a value of the file; a list as the text that W&B passes on."""
    if value is None:
        raise ConfigurationError(
            f'{where} has the value null, which W&B passes on as None: write "null"'
        )
    if isinstance(value, dict):
        raise ConfigurationError(
            f"{where} has a dictionary, which W&B passes on as Python prints it: write it as text,"
            f" '{json.dumps(value)}'"
        )
    return value if isinstance(value, (str, int, float)) else str(value)


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


def _command(path: Path, entry: Any, options: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of the program, without W&B's logger and with ``options``."""
    words = [str(word) for word in entry] if isinstance(entry, list) else []
    if "fit" not in words or words.count("${args}") != 1:
        raise ConfigurationError(
            f"{path}: command is {entry!r}: give a list with fit, its configurations and options,"
            ' and "${args}" once, where the parameters are inserted. Only ${args} passes on'
            " booleans correctly"
        )
    kept: list[str] = []
    for word in words[words.index("fit") :]:
        is_logger = WANDB_LOGGER.fullmatch(word) is not None
        if is_logger and kept and kept[-1] in ("-c", "--config"):
            kept.pop()
        elif not (is_logger and word.startswith(("-c=", "--config="))):
            kept.append(VARIABLE.sub(lambda match: _variable(path, match[1]), word))
    index = kept.index("${args}")
    return (*kept[:index], *options, *kept[index:])


def _variable(path: Path, name: str) -> str:
    """Return the value of an environment variable of the command.

    Raises:
        ConfigurationError: if it is not set; W&B would insert its name.
    """
    if name not in os.environ:
        raise ConfigurationError(
            f"{path}: command has the environment variable {name}, which is not set: export it"
        )
    return os.environ[name]


def _hyperband(path: Path, entry: Any) -> Hyperband | None:
    """Return when weak runs end early; None for never."""
    if entry is None:
        return None
    where = f"{path}: early_terminate"
    if not isinstance(entry, dict) or entry.get("type") != "hyperband":
        raise ConfigurationError(
            f"{where} is {entry!r}: give {{type: hyperband, min_iter: 3, eta: 3}}"
        )
    eta = entry.get("eta", DEFAULT_ETA)
    min_iter = entry.get("min_iter")
    if min_iter is None and {"max_iter", "s"} <= entry.keys():
        min_iter = max(1, round(entry["max_iter"] / eta ** entry["s"]))
    if type(min_iter) is not int or min_iter < 1 or type(eta) is not int or eta < 2:
        raise ConfigurationError(
            f"{where} is {entry!r}: give min_iter (or max_iter and s), evaluations before the first"
            " decision, and eta above 1, whole numbers"
        )
    return Hyperband(min_iter, eta)
