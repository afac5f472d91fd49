"""Checks of the factories that an algorithm receives: they build its parts."""

from __future__ import annotations

import collections.abc
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from torch import nn

from mtrl_lightning.algorithms.description import called_by, parameters_of, type_hints
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod

_REPLACED = ("observation_space", "num_tasks", "action_dim")
"""Parameters of factories up to version 0.2, which the spec has replaced."""


def check_factories(called: Any, arguments: Mapping[str, Any], where: str = "") -> None:
    """Check the factories among the arguments of a class or function, and those within them.

    Args:
        called: the class or function; its annotations tell which arguments are factories.
        arguments: by name.
        where: name of the argument that ``called`` is; empty for an algorithm.

    Raises:
        ConfigurationError: if an object is given in place of a factory, or a factory takes numbers
            that the spec has replaced.
    """
    hints = type_hints(called)
    for name, value in arguments.items():
        if _is_factory(hints.get(name)):
            for factory in value if isinstance(value, (list, tuple)) else [value]:
                _check_factory(factory, f"{where}.{name}" if where else name)


def _is_factory(annotation: Any) -> bool:
    if typing.get_origin(annotation) is collections.abc.Callable:
        return True
    return any(_is_factory(part) for part in typing.get_args(annotation))


def _check_factory(factory: Any, option: str) -> None:
    if factory is None:
        return
    kind = type(factory).__name__
    if isinstance(factory, nn.Module) or not callable(factory):
        raise ConfigurationError(
            f"{option} is an object, {kind}, and has to be what builds one: give its class, a"
            f" function, or functools.partial({kind}, ...)"
        )
    called, given = called_by(factory)
    if called is None:
        return
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    replaced = [
        name
        for name, p in parameters_of(called).items()
        if name in _REPLACED and p.kind in positional and p.default is p.empty
    ]
    if replaced:
        is_gradient = inspect.isclass(called) and issubclass(called, GradientMethod)
        source = "spec.num_trained" if is_gradient else "spec.num_tasks"
        values = {"num_tasks": source, "action_dim": "spec.action_space.shape[0]"}
        read = " and ".join(values.get(name, f"spec.{name}") for name in replaced)
        former = " and ".join(replaced)
        raise ConfigurationError(
            f"{option}: {called.__qualname__} takes {former}, and parts receive the spec in place"
            f" of {former} since 0.3: rename the parameter to spec and read {read}"
        )
    check_factories(called, given, option)
