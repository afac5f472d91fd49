"""The arguments of constructors, and checks of the factories among them.

A factory builds a part: a class, ``functools.partial`` of one, or a function.
"""

from __future__ import annotations

import collections.abc
import inspect
import typing
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from mtrl_lightning.errors import ConfigurationError


def type_hints(called: Any) -> dict[str, Any]:
    """Return the types of a constructor's arguments, as far as they can be known."""
    classes = called.__mro__[::-1] if inspect.isclass(called) else (called,)
    hints: dict[str, Any] = {}
    for kind in classes:
        function = vars(kind).get("__init__") if inspect.isclass(kind) else kind
        if inspect.isfunction(function):
            try:
                hints |= typing.get_type_hints(function)
            except NameError:  # a name that only type checkers import
                continue
    return hints


def called_by(factory: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a factory's class or function, None if unknown, and its keyword arguments."""
    if not isinstance(factory, partial):
        return factory, {}
    if not factory.args:
        called, keywords = called_by(factory.func)
        return called, {**keywords, **factory.keywords}
    # jsonargparse gives partial(its own function, ..., class, **init_args) for a class in YAML
    function = factory.func
    module = function.__module__ if inspect.isfunction(function) else type(function).__module__
    is_from_yaml = module.split(".")[0] == "jsonargparse" and inspect.isclass(factory.args[-1])
    return (factory.args[-1] if is_from_yaml else None), factory.keywords


def check_factories(called: Any, arguments: Mapping[str, Any], where: str = "") -> None:
    """Check the factories among the arguments of a class or function, and those within them.

    Args:
        called: the class or function; its annotations tell which arguments are factories.
        arguments: by name.
        where: name of the argument that ``called`` is; empty for an algorithm.

    Raises:
        ConfigurationError: if an object is given instead of a factory.
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
            f"{option} is an object, {kind}, and has to be a factory: give its class, a function,"
            f" or functools.partial({kind}, ...)"
        )
    called, keywords = called_by(factory)
    if called is not None:
        check_factories(called, keywords, option)
