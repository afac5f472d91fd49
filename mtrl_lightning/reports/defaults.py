"""In which options a run differs from the defaults of the classes that it is made of."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

SECTIONS = {
    "data": "mtrl_lightning.run.data.MultiTaskData",
    "rollout": "mtrl_lightning.callbacks.RolloutCallback",
    "evaluation": "mtrl_lightning.callbacks.EvaluationCallback",
    "metrics": "mtrl_lightning.callbacks.MetricsCallback",
    "replay": "mtrl_lightning.callbacks.ReplayCallback",
    "checkpoint": "mtrl_lightning.callbacks.CheckpointCallback",
    "resets": "mtrl_lightning.callbacks.ResetCallback",
    "trainer": "lightning.pytorch.Trainer",
}
"""The classes of which a run's sections are the arguments."""
OWN_TRAINER_OPTIONS = ("max_epochs", "max_steps", "num_sanity_val_steps", "default_root_dir")
"""Options of the trainer that every run sets."""
USUAL_PRECISION = ("precision", "32-true")
"""The trainer's default, which its signature does not show."""
NOT_OPTIONS = ("name", "root", "ckpt_path", "config", "overwrite_metrics", "verbose")
TRUSTED = ("mtrl_lightning", "torch", "lightning")
"""Packages whose classes are imported; another one's are known if they are imported already."""


class _Unknown:
    """Stands for a default that is not known, or that there is none."""

    def __repr__(self) -> str:
        return "-"


UNKNOWN = _Unknown()


class Difference(NamedTuple):
    """An option that is not at its default."""

    name: str
    value: Any
    default: Any


def differences(options: Mapping[str, Any]) -> list[Difference]:
    """Return the options that differ from the defaults, and those that have none.

    Args:
        options: sections and their options by name, as ``config.yaml`` holds them.
    """
    found: list[Difference] = []
    for name, value in options.items():
        if name in NOT_OPTIONS:
            continue
        if isinstance(value, Mapping) and name in SECTIONS:
            found += _arguments(value, _imported(SECTIONS[name]), name)
        elif name == "seed_everything":
            found += [Difference(name, value, 1)] if value != 1 else []
        else:
            found += _value(value, UNKNOWN, name)
    return found


def _arguments(given: Mapping[str, Any], owner: Any, name: str) -> Iterator[Difference]:
    """Yield the arguments that differ from those of a class's constructor."""
    defaults = defaults_of(owner)
    for argument, value in given.items():
        is_own = name == "trainer" and (
            argument in OWN_TRAINER_OPTIONS or (argument, value) == USUAL_PRECISION
        )
        # the seed follows from seed_everything
        if argument == "seed" or is_own:
            continue
        yield from _value(value, defaults.get(argument, UNKNOWN), f"{name}.{argument}")


def _value(value: Any, default: Any, name: str) -> Iterator[Difference]:
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        yield from _instance(value, default, name)
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            inner = default.get(key, UNKNOWN) if isinstance(default, Mapping) else UNKNOWN
            yield from _value(item, inner, f"{name}.{key}")
    elif not _equal(value, default):
        yield Difference(name, value, _shown(default))


def _instance(value: Mapping[str, Any], default: Any, name: str) -> Iterator[Difference]:
    """Yield what differs in a class, and in its arguments from those of the class's default."""
    path = value["class_path"]
    owner = _imported(path)
    given = value.get("init_args")
    arguments = given if isinstance(given, Mapping) else {}
    keywords = default.keywords if isinstance(default, functools.partial) else {}
    usual = default.func if isinstance(default, functools.partial) else default
    if owner is None or (owner is not usual and owner is not type(usual)):
        yield Difference(name, path, _shown(default))
        keywords = {}
    known = defaults_of(owner) | keywords
    for argument, item in arguments.items():
        if argument != "seed":
            yield from _value(item, known.get(argument, UNKNOWN), f"{name}.{argument}")


def _imported(path: str) -> Any:
    """Return the class or function of a path; None if it takes an import of foreign code."""
    module_name, _, name = path.rpartition(".")
    module = sys.modules.get(module_name)
    if module_name.split(".")[0] in TRUSTED:
        try:
            module = importlib.import_module(module_name)
        except Exception:  # such as a part of PyTorch that this machine cannot import
            return None
    found = getattr(module, name, None)
    return found if callable(found) else None


@functools.cache
def defaults_of(owner: Any) -> dict[str, Any]:
    """Return the defaults of a constructor's or function's arguments, also of base classes."""
    found: dict[str, Any] = {}
    if owner is None:
        return found
    functions = [owner]
    if isinstance(owner, type):
        functions = [vars(base)["__init__"] for base in owner.__mro__ if "__init__" in vars(base)]
    for function in functions:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            continue
        for parameter in parameters:
            has_default = parameter.default is not inspect.Parameter.empty
            found.setdefault(parameter.name, parameter.default if has_default else UNKNOWN)
    return found


def _equal(value: Any, default: Any) -> bool:
    if isinstance(default, (list, tuple)) and isinstance(value, (list, tuple)):
        return list(value) == list(default)
    if isinstance(value, str) and not isinstance(default, str):
        # a class or function by its name
        named = _imported(value) if "." in value else None
        return named is not None and (named is default or named is type(default))
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)


def _shown(default: Any) -> Any:
    """Return a default as it is shown: a class or function by its name."""
    if isinstance(default, functools.partial):
        keywords = ", ".join(f"{name}={value}" for name, value in default.keywords.items())
        return f"{default.func.__name__}({keywords})"
    if isinstance(default, type) or inspect.isfunction(default):
        return UNKNOWN if default.__name__ == "<lambda>" else default.__name__
    if default is None or isinstance(default, (str, int, float, bool, list, tuple, dict, _Unknown)):
        return default
    return type(default).__name__
