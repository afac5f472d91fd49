"""A sweep file, in the format of W&B: what is varied, how it is chosen, and the command of a run.

PyTorch is not imported.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mtrl_lightning.checks import one_of
from mtrl_lightning.errors import ConfigurationError

Value = str | int | float | bool
"""A value of a parameter, as it is stored; its text is what the command line has."""

SEED = "seed_everything"
"""The parameter whose values are the seeds of every configuration."""
METHODS = ("grid", "random", "bayes")
KEYS = {
    "program",
    "project",
    "entity",
    "name",
    "description",
    "method",
    "metric",
    "parameters",
    "command",
    "early_terminate",
    "run_cap",
}
"""Keys of a sweep file that are understood here."""
CHOICES = ("categorical", "constant")
RANGES = {
    "uniform": (float, False),
    "q_uniform": (float, False),
    "log_uniform": (float, True),
    "log_uniform_values": (float, True),
    "int_uniform": (int, False),
}
"""Distributions between two numbers: the type of a value, and whether its logarithm is drawn."""
WANDB_LOGGER = "logger/wandb"
"""The configuration that is left out of the command: there is no account here."""
VARIABLE = re.compile(r"\$\{envvar:([A-Z0-9_]*)\}")
DEFAULT_ETA = 3


class Parameter(NamedTuple):
    """What is varied, by the name of its option."""

    name: str
    choices: tuple[Value, ...] = ()
    """Its values; empty for a range."""
    low: float = 0.0
    high: float = 0.0
    kind: type = float
    """Type of the values of a range."""
    is_log: bool = False
    """Whether the logarithm of a range's value is drawn."""
    step: float | None = None
    """Distance between the values of a range; None for any value."""

    @property
    def corners(self) -> tuple[Value, ...]:
        """The values that are tried before a sweep starts: all choices, or a range's ends."""
        return self.choices or (self.kind(self.low), self.kind(self.high))

    def allows(self, value: Any) -> bool:
        """Return whether a value is a choice, or of the range's type and within it."""
        if self.choices:
            return any(type(one) is type(value) and one == value for one in self.choices)
        if not isinstance(value, (int, float)) or type(value) is not self.kind:
            return False
        is_end = any(math.isclose(value, end) for end in (self.low, self.high))  # rounded
        return is_end or self.low <= value <= self.high


class Hyperband(NamedTuple):
    """When weak runs end early."""

    min_iter: int
    """Evaluations before the first decision."""
    eta: int
    """One run in this many continues; evaluations between decisions grow by this factor."""


class SweepFile(NamedTuple):
    """What a sweep file says."""

    path: Path
    name: str
    method: str
    """How configurations are chosen: ``grid``, ``random`` or ``bayes``."""
    metric: str
    is_maximized: bool
    parameters: tuple[Parameter, ...]
    seeds: tuple[int | None, ...]
    """Seeds of every configuration; None for that of the command."""
    command: tuple[str, ...]
    """What follows the program, with ``${args}`` where the parameters stand."""
    hyperband: Hyperband | None
    run_cap: int | None
    notes: tuple[str, ...]
    """What has an effect with W&B only."""

    @property
    def grid(self) -> list[dict[str, Value]]:
        """All combinations of the choices, in a fixed order."""
        names = [parameter.name for parameter in self.parameters]
        chosen = itertools.product(*(parameter.choices for parameter in self.parameters))
        return [dict(zip(names, values, strict=True)) for values in chosen]

    @property
    def corners(self) -> list[dict[str, Value]]:
        """Few configurations that have every choice, and the ends of every range."""
        values = {parameter.name: parameter.corners for parameter in self.parameters}
        number = max((len(one) for one in values.values()), default=1)
        return [{name: one[k % len(one)] for name, one in values.items()} for k in range(number)]

    def identity(self) -> dict[str, Any]:
        """Return what must not change while a sweep is continued, as plain values."""
        parts = self._asdict()
        for name in ("path", "name", "run_cap", "notes"):
            del parts[name]
        parts["parameters"] = {
            one.name: {**one._asdict(), "kind": one.kind.__name__} for one in self.parameters
        }
        return json.loads(json.dumps(parts))

    def arguments(self, values: Mapping[str, Value], seed: int | None = None) -> list[str]:
        """Return the arguments of the program for one configuration, beginning with ``fit``.

        Args:
            values: of the parameters, by name.
            seed: of the run; None for that of the command.
        """
        given = [f"--{name}={value}" for name, value in values.items()]
        own_seed = [] if seed is None else [f"--{SEED}={seed}"]
        index = self.command.index("${args}")
        return [*self.command[:index], *given, *self.command[index + 1 :], *own_seed]


def read_sweep_file(path: Path, options: tuple[str, ...] = ()) -> SweepFile:
    """Read a sweep file.

    Args:
        path: a YAML file in the format of W&B.
        options: of ``fit``, which every run of this machine gets besides.

    Raises:
        ConfigurationError: if it says what is not understood here; the message names the remedy.
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
    unknown = sorted(set(content) - KEYS)
    if unknown:
        raise ConfigurationError(
            f"{path}: {', '.join(unknown)} is not understood; a sweep file has"
            f" {', '.join(sorted(KEYS))}"
        )
    method: Any = content.get("method")
    one_of(METHODS, method=method, prefix=f"{path}: ")
    metric, is_maximized, notes = _metric_of(path, content.get("metric"))
    given = content["parameters"]
    if not isinstance(given, dict) or not given:
        raise ConfigurationError(f"{path}: parameters is {given!r}: give options of fit by name")
    parameters = [_parameter_of(path, name, one) for name, one in given.items() if name != SEED]
    ranges = [one.name for one in parameters if not one.choices]
    if method == "grid" and ranges:
        raise ConfigurationError(
            f"{path}: a grid needs values for {', '.join(ranges)}: give values: [...], or method:"
            " random"
        )
    return SweepFile(
        path=path,
        name=str(content.get("name", path.stem)),
        method=method,
        metric=metric,
        is_maximized=is_maximized,
        parameters=tuple(parameters),
        seeds=_seeds_of(path, given.get(SEED)),
        command=_command_of(path, content.get("command"), options),
        hyperband=_hyperband_of(path, content.get("early_terminate")),
        run_cap=content.get("run_cap"),
        notes=notes,
    )


def _metric_of(path: Path, given: Any) -> tuple[str, bool, tuple[str, ...]]:
    """Return the metric's name, whether it is maximized, and notes."""
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise ConfigurationError(
            f"{path}: metric is {given!r}: give {{name: eval/success, goal: maximize}}"
        )
    goal = given.get("goal", "minimize")
    one_of(("maximize", "minimize"), goal=goal, prefix=f"{path}: metric.")
    notes = ("metric.target ends a sweep of W&B, not this one",) if "target" in given else ()
    return given["name"], goal == "maximize", notes


def _parameter_of(path: Path, name: str, given: Any) -> Parameter:
    """Return a parameter; ``given`` is its entry in the file."""
    where = f"{path}: parameter {name}"
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where} is {given!r}: give {{values: [...]}} or min and max")
    if "parameters" in given:
        raise ConfigurationError(
            f"{where} has parameters of its own, which W&B passes on as one dictionary: give each"
            " its full name, such as model.init_args.tau"
        )
    if "value" in given or "values" in given:
        values = given["values"] if "values" in given else [given["value"]]
        if not isinstance(values, list) or not values:
            raise ConfigurationError(f"{where}: values is {values!r}: give a list")
        if "probabilities" in given:
            raise ConfigurationError(f"{where}: probabilities have an effect with W&B only")
        return Parameter(name, tuple(_value_of(where, value) for value in values))
    if not {"min", "max"} <= set(given):
        raise ConfigurationError(f"{where} is {given!r}: give values, value, or min and max")
    low = given["min"]
    high = given["max"]
    for bound, value in (("min", low), ("max", high)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigurationError(
                f"{where}: {bound} is {value!r}: give a number (YAML takes 1e-4 for a text, 1.0e-4"
                " for a number)"
            )
    are_whole = isinstance(low, int) and isinstance(high, int)
    name_of = given.get("distribution", "int_uniform" if are_whole else "uniform")
    if name_of not in RANGES:
        raise ConfigurationError(
            f"{where}: distribution {name_of!r} has an effect with W&B only: give one of"
            f" {', '.join([*CHOICES, *RANGES])}"
        )
    if name_of == "log_uniform":  # its bounds are natural logarithms
        low = math.exp(low)
        high = math.exp(high)
    kind, is_log = RANGES[name_of]
    if not low < high or (is_log and low <= 0):
        wanted = "0 < min < max" if is_log else "min < max"
        raise ConfigurationError(f"{where}: min is {low} and max {high}: give {wanted}")
    step = given.get("q", 1) if name_of == "q_uniform" else None
    return Parameter(name, (), low, high, kind, is_log, step)


def _value_of(where: str, value: Any) -> Value:
    """Return a value of the file; lists and dictionaries as the text that W&B passes on."""
    if value is None:
        raise ConfigurationError(
            f'{where} has the value null, which W&B passes on as None: write "null"'
        )
    if isinstance(value, dict):
        raise ConfigurationError(
            f"{where} has a dictionary, which W&B passes on as Python prints it: write it as text,"
            f" '{json.dumps(value)}'"
        )
    return str(value) if isinstance(value, list) else value


def _seeds_of(path: Path, given: Any) -> tuple[int | None, ...]:
    """Return the seeds of every configuration."""
    if given is None:
        return (None,)
    seeds = _parameter_of(path, SEED, given).choices
    if not seeds or not all(type(seed) is int for seed in seeds):
        raise ConfigurationError(
            f"{path}: {SEED} is {given!r}: give values: [1, 2, 3], the seeds of every configuration"
        )
    return tuple(int(seed) for seed in seeds)


def _command_of(path: Path, given: Any, options: tuple[str, ...]) -> tuple[str, ...]:
    """Return what follows the program, without W&B's logger."""
    words = [str(word) for word in given] if isinstance(given, list) else []
    if "fit" not in words or words.count("${args}") != 1:
        raise ConfigurationError(
            f"{path}: command is {given!r}: give a list with fit, its configurations and options,"
            ' and "${args}" once, where the parameters stand. Only ${args} passes on booleans'
            " rightly"
        )
    kept: list[str] = []
    for word in words[words.index("fit") :]:
        if kept and kept[-1] in ("-c", "--config") and _is_wandb_logger(word):
            kept.pop()
        elif not (word.startswith(("-c=", "--config=")) and _is_wandb_logger(word)):
            kept.append(VARIABLE.sub(lambda found: _variable(path, found[1]), word))
    place = kept.index("${args}")
    return (*kept[:place], *options, *kept[place:])


def _variable(path: Path, name: str) -> str:
    """Return the value of an environment variable, in whose place W&B leaves an unset one's name.

    Raises:
        ConfigurationError: if it is not set.
    """
    if name not in os.environ:
        raise ConfigurationError(
            f"{path}: command has the environment variable {name}, which is not set: export it"
        )
    return os.environ[name]


def _is_wandb_logger(word: str) -> bool:
    name = word.split("=")[-1].replace("\\", "/").removesuffix(".yaml")
    return name == WANDB_LOGGER or name.endswith(f"/{WANDB_LOGGER}")


def _hyperband_of(path: Path, given: Any) -> Hyperband | None:
    """Return when weak runs end early; None for never."""
    if given is None:
        return None
    where = f"{path}: early_terminate"
    if not isinstance(given, dict) or given.get("type") != "hyperband":
        raise ConfigurationError(
            f"{where} is {given!r}: give {{type: hyperband, min_iter: 3, eta: 3}}"
        )
    eta = given.get("eta", DEFAULT_ETA)
    min_iter = given.get("min_iter")
    if min_iter is None and {"max_iter", "s"} <= set(given):
        min_iter = max(1, round(given["max_iter"] / eta ** given["s"]))
    if type(min_iter) is not int or min_iter < 1 or type(eta) is not int or eta < 2:
        raise ConfigurationError(
            f"{where} is {given!r}: give min_iter (or max_iter and s), evaluations before the first"
            " decision, and eta above 1, whole numbers"
        )
    return Hyperband(min_iter, eta)
