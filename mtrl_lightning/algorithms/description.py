"""An algorithm as plain values, from which ``rebuilding`` builds it.

A factory (a class, ``functools.partial`` of one, a function of a module) is described as
``{"class_path": ..., "init_args": {...}}``, whether it was given in Python or on the command line.
An object without an import path, such as a lambda, is described as ``{"cannot_rebuild": text}``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from lightning_utilities.core.apply_func import apply_to_collection

from mtrl_lightning.algorithms.arguments import called_by, check_factories
from mtrl_lightning.signatures import parameters_of, recorded_arguments
from mtrl_lightning.spec import EnvSpec

CLASS_PATH = "class_path"
INIT_ARGS = "init_args"
CANNOT_REBUILD = "cannot_rebuild"
_SCRIPTS = ("__main__", "__mp_main__")
"""Names of the running script's module: another process has another module by this name."""


def describe_built(built: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Describe an algorithm whose constructor runs; called once, by the constructor of the base.

    Returns:
        The description, which rebuilds it; and the arguments of all its constructors as
        hyper-parameters for loggers.

    Raises:
        ConfigurationError: if an argument is an object in place of a factory.
    """
    kind = type(built)
    own_arguments, all_arguments = recorded_arguments(built)
    check_factories(kind, own_arguments)
    described = describe_algorithm(kind, all_arguments)[INIT_ARGS]
    # lists, because loggers write them as YAML, which has no tuples
    hyper_parameters = apply_to_collection(described, tuple, list)
    return describe_algorithm(kind, own_arguments), hyper_parameters


def describe_algorithm(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Describe an algorithm by its class and the arguments of its constructor, defaults included.

    Args:
        kind: the algorithm's class.
        given: all arguments of the constructor by name; the spec is left out.
    """
    arguments = {name: value for name, value in given.items() if not isinstance(value, EnvSpec)}
    path = import_path(kind) or qualified_name(kind)
    return {CLASS_PATH: path, INIT_ARGS: _describe_arguments(arguments, parameters_of(kind))}


def summarize(description: Mapping[str, Any]) -> str:
    """Return the classes of a described algorithm and of its parts, as ``SAC: actor MLP, ...``."""
    parts = [
        f"{name} {short_name(value)}"
        for name, value in description[INIT_ARGS].items()
        if isinstance(value, Mapping) and CLASS_PATH in value
    ]
    return f"{short_name(description)}: {', '.join(parts)}"


def short_name(description: Mapping[str, Any]) -> str:
    """Return the name of a described class, without its module."""
    return str(description[CLASS_PATH]).rsplit(".", 1)[-1]


def cannot_rebuild(described: Any, argument: str = "") -> dict[str, str]:
    """Return the arguments, such as ``actor.conditioning``, that a description has no class of.

    Args:
        described: the described arguments by name, or a part of them.
        argument: where the part is.

    Returns:
        A text about each, by the argument's name.
    """
    if isinstance(described, Mapping):
        if set(described) == {CANNOT_REBUILD}:
            return {argument: str(described[CANNOT_REBUILD])}
        inner = described.get(INIT_ARGS, {}) if CLASS_PATH in described else described
        parts = [(f"{argument}.{name}" if argument else name, v) for name, v in inner.items()]
    elif isinstance(described, (list, tuple)):
        parts = [(f"{argument}[{index}]", value) for index, value in enumerate(described)]
    else:
        parts = []
    unknown: dict[str, str] = {}
    for where, value in parts:
        unknown |= cannot_rebuild(value, where)
    return unknown


def argument_of(name: str) -> str:
    """Return the constructor's argument of a nested one: ``actor`` of ``actor.conditioning``."""
    return name.split(".")[0].split("[")[0]


def _describe(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_describe(item) for item in value)
    if isinstance(value, Mapping) and _is_plain_mapping(value):
        return {name: _describe(item) for name, item in value.items()}
    called, given = called_by(value)
    path = import_path(called)
    if path is None:
        return {CANNOT_REBUILD: _in_words(value)}
    parameters = parameters_of(called)
    arguments = _describe_arguments(given, parameters)
    if called.__module__.split(".")[0] != "torch":  # its optimizers have many options
        defaults = _describe_defaults(parameters)
        arguments |= {name: value for name, value in defaults.items() if name not in given}
    return {CLASS_PATH: path, INIT_ARGS: arguments} if arguments else {CLASS_PATH: path}


def _is_plain_mapping(value: Mapping[Any, Any]) -> bool:
    names_are_text = all(type(name) is str for name in value)
    return names_are_text and not {CLASS_PATH, CANNOT_REBUILD} & set(value)


def _describe_arguments(
    given: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """Describe arguments; a default that cannot be rebuilt is left out: the class has it."""
    described = {name: _describe(value) for name, value in given.items()}
    for name in given.keys() & parameters.keys():
        if given[name] is parameters[name].default and cannot_rebuild(described[name]):
            del described[name]
    return described


def _describe_defaults(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Describe the defaults of options, because another version may have others."""
    options = {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    described = {n: _describe(v) for n, v in options.items() if v is not inspect.Parameter.empty}
    return {name: value for name, value in described.items() if not cannot_rebuild(value)}


def import_path(called: Any) -> str | None:
    """Return the shortest name that imports a class or function; None if there is none."""
    is_method = inspect.ismethod(called) and inspect.isclass(called.__self__)
    if not (inspect.isclass(called) or inspect.isfunction(called) or is_method):
        return None
    owner = called.__self__ if is_method else called
    module = owner.__module__
    name = owner.__qualname__
    if is_method:
        name = f"{name}.{called.__name__}"
    if module in _SCRIPTS or not is_import_path(f"{module}.{name}"):
        return None
    packages = module.split(".")
    for length in range(min(2, len(packages)), len(packages) + 1):
        package = ".".join(packages[:length])
        attribute: Any = sys.modules.get(package)
        for part in name.split("."):
            attribute = getattr(attribute, part, None)
        if attribute == called:
            return f"{package}.{name}"
    return None


def is_import_path(path: str) -> bool:
    """Return whether a name may be a class or function of a module."""
    parts = path.split(".")
    return len(parts) > 1 and all(p.isidentifier() and not p.startswith("__") for p in parts)


def qualified_name(called: Any) -> str:
    """Return module and name of a class or function, whether it can be imported or not."""
    return f"{called.__module__}.{called.__qualname__}"


def _in_words(value: Any) -> str:
    called, _ = called_by(value)
    if inspect.isclass(called) or inspect.isroutine(called):
        kind = "class" if inspect.isclass(called) else "function"
        return f"the {kind} {qualified_name(called)}"
    if isinstance(value, partial):
        return "a functools.partial with positional arguments"
    return f"an object of {qualified_name(type(value))}"
