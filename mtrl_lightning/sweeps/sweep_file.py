"""A sweep file in W&B's format: parameters with their distributions, and the command of a run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mtrl_lightning.checks import at_least, one_of
from mtrl_lightning.errors import ConfigurationError, import_optional

optuna = import_optional("optuna", '"mtrl_lightning[sweep]"')
optuna.logging.set_verbosity(optuna.logging.WARNING)

Value = str | int | float | bool | None
"""A parameter's value, as Optuna stores it; its text is given on the command line."""

ARGS = "${args}"
"""Where the parameters are inserted in the command."""
METHODS = ("grid", "random", "bayes")
NEEDED = {"method": str, "metric": dict, "parameters": dict, "command": list}
"""Keys that a sweep file must have, and their types."""
OPTIONAL = ("description", "early_terminate", "entity", "name", "program", "project", "run_cap")
EXAMPLE = "see configs/sweep, or mtrl-lightning list sweep"
DISTRIBUTIONS: dict[str, Callable[..., Any]] = {
    "constant": lambda value: _choices([value]),
    "categorical": lambda values: _choices(values),
    "uniform": lambda min, max: optuna.distributions.FloatDistribution(min, max),
    "q_uniform": lambda min, max, q: optuna.distributions.FloatDistribution(min, max, step=q),
    "log_uniform_values": lambda min, max: optuna.distributions.FloatDistribution(min, max, True),
    "int_uniform": lambda min, max: optuna.distributions.IntDistribution(index(min), index(max)),
}
"""Distributions of W&B that are understood here."""
WANDB_LOGGER = ("logger/wandb", "logger/wandb.yaml")
"""The configuration that is left out of the command: there is no account here."""
DEFAULT_ETA = 3


class SweepFile(NamedTuple):
    """The content of a sweep file."""

    path: Path
    name: str
    method: str
    """How configurations are chosen: ``grid``, ``random`` or ``bayes``."""
    metric: str
    goal: str
    """``maximize`` or ``minimize``."""
    parameters: dict[str, Any]
    """Optuna's distributions of options of ``fit``."""
    command: tuple[str, ...]
    """The arguments of the program, with ``${args}`` where the parameters are inserted."""
    run_cap: int | None
    pruner: Any
    """Ends weak runs early, by the number of their evaluations."""
    identity: dict[str, str]
    """What must not change while the sweep is continued."""

    @property
    def grid(self) -> list[dict[str, Value]]:
        """All combinations of the choices, in the order of the file; empty for a search."""
        if self.method != "grid":
            return []
        choices = itertools.product(*map(_corners, self.parameters.values()))
        return [dict(zip(self.parameters, values, strict=True)) for values in choices]

    @property
    def corners(self) -> list[dict[str, Value]]:
        """Few configurations that together have every choice and the ends of every range."""
        values = {name: _corners(one) for name, one in self.parameters.items()}
        size = max(map(len, values.values()))
        return [{name: one[k % len(one)] for name, one in values.items()} for k in range(size)]

    def arguments(self, values: Mapping[str, Value]) -> list[str]:
        """Return the arguments of the program for one configuration, beginning with ``fit``."""
        index = self.command.index(ARGS)
        options = [f"--{name}={value}" for name, value in values.items()]
        return [*self.command[:index], *options, *self.command[index + 1 :]]


def _corners(distribution: Any) -> tuple[Value, ...]:
    """Return all choices of a parameter, or the two ends of its range."""
    choices = getattr(distribution, "choices", None)
    return choices or (distribution.low, distribution.high)


def read_sweep_file(path: Path, options: tuple[str, ...] = ()) -> SweepFile:
    """Read a sweep file.

    Args:
        path: a YAML file in the format of W&B.
        options: further options of ``fit``, for every run.

    Raises:
        ConfigurationError: if the file cannot be read or a part of it is not understood here; with
            what to write instead.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"the sweep file {path} cannot be read: {error}") from error
    try:
        return _parsed(path, content, options)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _parsed(path: Path, content: Any, options: tuple[str, ...]) -> SweepFile:
    if not isinstance(content, dict) or not NEEDED.keys() & content.keys():
        raise ConfigurationError(f"this is no sweep file: {EXAMPLE}")
    for key, kind in NEEDED.items():
        if not content.get(key) or not isinstance(content[key], kind):
            raise ConfigurationError(f"{key} is {content.get(key)!r}: {EXAMPLE}")
    for key in content:
        one_of([*NEEDED, *OPTIONAL], key=key)
    method, metric, run_cap = content["method"], content["metric"], content.get("run_cap")
    goal = metric.get("goal", "minimize")
    one_of(METHODS, method=method)
    one_of(("maximize", "minimize"), goal=goal, prefix="metric.")
    at_least(1, run_cap=run_cap)
    if not isinstance(metric.get("name"), str):
        raise ConfigurationError(f"metric is {metric}: give {{name: eval/success, goal: maximize}}")
    entries = content["parameters"].items()
    parameters = {name: _distribution(f"parameter {name}", entry) for name, entry in entries}
    ranges = [name for name, one in parameters.items() if not hasattr(one, "choices")]
    if method == "grid" and ranges:
        raise ConfigurationError(
            f"a grid needs values for {', '.join(ranges)}: give values: [...], or method: random"
        )
    command = _command(content["command"], options)
    pruner = _pruner(content.get("early_terminate"))
    return SweepFile(
        path=path,
        name=str(content.get("name", path.stem)),
        method=method,
        metric=metric["name"],
        goal=goal,
        parameters=parameters,
        command=command,
        run_cap=run_cap,
        pruner=pruner,
        identity={
            **{name: str(content.get(name)) for name in (*NEEDED, "early_terminate")},
            "command": str(command),
        },
    )


def _choices(values: Sequence[Any]) -> Any:
    """Return a distribution; lists and dictionaries become the texts that ``fit`` takes."""
    choices = [json.dumps(one) if isinstance(one, (list, dict)) else one for one in values]
    return optuna.distributions.CategoricalDistribution(choices)


def _distribution(where: str, entry: Any) -> Any:
    """Return Optuna's distribution of a parameter, by default the one that W&B takes.

    Args:
        where: the parameter, for messages.
        entry: of the file.
    """
    options = dict(entry) if isinstance(entry, dict) else {"values": entry}
    are_whole = all(isinstance(options.get(bound), int) for bound in ("min", "max"))
    default = "int_uniform" if are_whole else "uniform"
    if "value" in options or "values" in options:
        default = "constant" if "value" in options else "categorical"
    name = options.pop("distribution", default)
    one_of(DISTRIBUTIONS, distribution=name, prefix=f"{where}: ", hint="; others need W&B")
    try:
        return DISTRIBUTIONS[name](**options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{where} is {entry!r}: {str(error).replace('<lambda>()', name)}. Give values, value,"
            " or min and max; YAML takes 1e-4 for a text, 1.0e-4 for a number. In place of a"
            " dictionary of parameters, give each its full name, such as model.init_args.tau"
        ) from error


def _command(entry: list[Any], options: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of the program, without W&B's logger and with ``options``."""
    words: list[str] = []
    for word in map(str, entry):
        if not word.endswith(WANDB_LOGGER):
            words.append(word)
        elif words and words[-1] in ("-c", "--config"):
            words.pop()
    arguments = words[words.index("fit") :] if "fit" in words else []
    if [word for word in arguments if "${" in word] != [ARGS]:
        raise ConfigurationError(
            f"command is {entry!r}: give a list with fit, its configurations and options, and"
            f' "{ARGS}" once, where the parameters are inserted. No other macro is replaced behind'
            " fit"
        )
    index = arguments.index(ARGS)
    return (*arguments[:index], *options, *arguments[index:])


def _pruner(entry: Any) -> Any:
    """Return Optuna's pruner for ``early_terminate``."""
    if entry is None:
        return optuna.pruners.NopPruner()
    try:
        if entry["type"] != "hyperband":
            raise ValueError(entry["type"])
        min_iter, eta = index(entry["min_iter"]), index(entry.get("eta", DEFAULT_ETA))
        return optuna.pruners.SuccessiveHalvingPruner(min_iter, eta)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"early_terminate is {entry!r}: give {{type: hyperband, min_iter: 3, eta: 3}}, with"
            " min_iter of at least 1 and eta of at least 2"
        ) from error
