"""Build the algorithm of a checkpoint from its description; only classes are looked up.

A description is data of a file. The classes of this package and of PyTorch may be named in it;
others only where the caller trusts their module.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mtrl_lightning.algorithms.arguments import type_hints
from mtrl_lightning.algorithms.description import (
    CLASS_PATH,
    INIT_ARGS,
    argument_of,
    cannot_rebuild,
    import_path,
    is_import_path,
    qualified_name,
)
from mtrl_lightning.checkpoints import load_checkpoint, restoring
from mtrl_lightning.errors import ConfigurationError, name_hint
from mtrl_lightning.saved_spec import rebuild_spec
from mtrl_lightning.signatures import parameters_of

if TYPE_CHECKING:
    from mtrl_lightning.algorithms.algorithm import Algorithm

A = TypeVar("A", bound="Algorithm")

ALWAYS_TRUSTED = (
    "mtrl_lightning.algorithms",
    "mtrl_lightning.auxiliaries",
    "mtrl_lightning.gradients",
    "mtrl_lightning.learning",
    "mtrl_lightning.networks",
    "torch.nn",
    "torch.optim",
)
"""Modules whose classes a checkpoint may name; other modules only where the caller trusts them."""
_Types = tuple[type, ...] | None
"""A class has to be a subclass of one of these; None for any class."""


def load_algorithm(
    kind: type[A],
    path: str | Path,
    device: str | torch.device = "cpu",
    *,
    strict: bool = True,
    trust: Sequence[str] = (),
    overrides: Mapping[str, Any],
) -> A:
    """Build the algorithm that a checkpoint describes, with its weights and its state.

    Args:
        kind: the class that the caller asked for.
        path: the checkpoint.
        device: of the weights.
        strict: whether all weights have to be those of the checkpoint.
        trust: further modules and packages whose classes the checkpoint may use.
        overrides: arguments of the constructor in place of the saved ones.

    Raises:
        ConfigurationError: if the checkpoint cannot be used.
    """
    checkpoint = load_checkpoint(path)
    checkpoint.pop("optimizer_states", None)  # a run that starts with these weights has new ones
    state = checkpoint["mtrl_lightning"]
    state.pop("global_generators", None)  # the generators of this process stay as they are
    with restoring(path):
        algorithm: A = rebuild_algorithm(state, kind, trust, overrides)
        algorithm.on_load_checkpoint(checkpoint)
        algorithm.load_state_dict(checkpoint["state_dict"], strict=strict)
    return algorithm.to(device)


def rebuild_algorithm(
    state: Mapping[str, Any],
    base: type,
    trust: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Any:
    """Build the algorithm that a checkpoint describes, with new weights.

    Only classes are looked up, and all of them before one is called.

    Args:
        state: the checkpoint's entry ``mtrl_lightning``.
        base: the class that the caller asked for, which is trusted.
        trust: modules and packages, ``["mytasks"]``, whose classes and functions may be used too.
        overrides: arguments of the constructor in place of the described ones.

    Raises:
        ConfigurationError: if a class is not trusted or not found, the checkpoint describes another
            algorithm, an override is unknown, or an argument cannot be rebuilt.
    """
    description = state["algorithm"]
    options = dict(overrides or {})
    trusted = (trust,) if isinstance(trust, str) else tuple(trust)
    path, described = description[CLASS_PATH], description.get(INIT_ARGS, {})
    is_base = path in (import_path(base), qualified_name(base))
    kind: Any = base if is_base else _resolve(path, "the algorithm", trusted)
    if not (inspect.isclass(kind) and issubclass(kind, base)):
        raise ConfigurationError(
            f"the checkpoint holds the algorithm {path}, which is no {base.__name__}:"
            " call load_from_checkpoint of its own class, or load_policy"
        )
    _check_names(kind, options, "the overrides")
    kept = {name: value for name, value in described.items() if name not in options}
    _check_rebuildable(kept)
    arguments = _rebuild_arguments(kind, kept, "", trusted)
    spec = options.pop("spec", None)
    arguments["spec"] = rebuild_spec(state["spec"]) if spec is None else spec
    return kind(**arguments, **options)


def class_of_package(description: Mapping[str, Any], base: type) -> Any:
    """Return a described subclass of this package; None if it is not of this package."""
    try:
        return _resolve(str(description[CLASS_PATH]), "the algorithm", (), (base,))
    except ConfigurationError:
        return None


def _check_rebuildable(described: Mapping[str, Any]) -> None:
    unknown = cannot_rebuild(described)
    if unknown:
        names = dict.fromkeys(argument_of(name) for name in unknown)
        lost = ", ".join(f"{name} ({text})" for name, text in unknown.items())
        raise ConfigurationError(
            f"the checkpoint cannot rebuild {lost}:"
            f" give {', '.join(f'{name}=...' for name in names)} when you load it"
        )


def _check_names(called: Any, names: Iterable[Any], where: str) -> None:
    """Check that a class takes arguments of these names."""
    parameters = parameters_of(called)
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            hint = name_hint(str(name), parameters)
            raise ConfigurationError(
                f"{called.__qualname__} takes no argument {name!r}, which is in {where}: {hint}"
            )


def _rebuild_arguments(
    called: Any, described: Mapping[str, Any], where: str, trusted: Sequence[str]
) -> dict[str, Any]:
    _check_names(called, described, where or "the checkpoint")
    hints = type_hints(called)
    rebuilt = {}
    for name, value in described.items():
        argument = f"{where}.{name}" if where else name
        rebuilt[name] = _rebuild(value, argument, trusted, _built_types(hints.get(name, Any)))
    return rebuilt


def _rebuild(value: Any, argument: str, trusted: Sequence[str], types: _Types) -> Any:
    if isinstance(value, (list, tuple)):
        items = (_rebuild(v, f"{argument}[{i}]", trusted, types) for i, v in enumerate(value))
        return type(value)(items)
    if not isinstance(value, Mapping):
        return value
    if CLASS_PATH not in value:
        return {n: _rebuild(v, f"{argument}.{n}", trusted, types) for n, v in value.items()}
    called = _resolve(value[CLASS_PATH], argument, trusted, types)
    arguments = _rebuild_arguments(called, value.get(INIT_ARGS, {}), argument, trusted)
    return partial(called, **arguments) if arguments else called


def _built_types(annotation: Any) -> _Types:
    """Return the types that a factory may build: ``Network`` for ``Callable[..., Network]``.

    Returns:
        None if the annotation leaves it open; empty if it allows no factory.
    """
    origin = typing.get_origin(annotation)
    inner = typing.get_args(annotation)
    is_factory = origin in (collections.abc.Callable, type)
    if is_factory and not (inner and inspect.isclass(inner[-1])):
        return None
    if is_factory:
        return (inner[-1],)
    if annotation in (Any, object, collections.abc.Callable, typing.Callable, type):
        return None
    all_types: tuple[type, ...] = ()
    for part in inner:
        types = _built_types(part)
        if types is None:
            return None
        all_types += types
    return all_types


def _resolve(
    path: str, argument: str, trusted: Sequence[str], types: _Types = None
) -> Callable[..., Any]:
    """Return the class of this name; a function only of a module that the caller trusts.

    Raises:
        ConfigurationError: if it may not be used, or there is none; nothing is imported before
            its name is allowed.
    """
    if not is_import_path(path):
        hint = f"give {argument_of(argument)}=..."
        if argument == "the algorithm":
            hint = "call load_from_checkpoint of the class itself, LoadedPolicy takes its result"
        raise ConfigurationError(
            f"the checkpoint needs {path!r} for {argument}, which no module has: {hint}"
        )
    _check_trusted(path, path, argument, trusted)
    resolved = _import(path, argument)
    is_class = inspect.isclass(resolved)
    if not (is_class or inspect.isfunction(resolved) or inspect.ismethod(resolved)):
        raise ConfigurationError(
            f"the checkpoint names {path} for {argument}: that is no class and no function"
        )
    # a trusted module also has names that it imports from others
    defined_as = qualified_name(resolved)
    _check_trusted(defined_as, path, argument, trusted)
    if _is_in(defined_as, trusted):
        return resolved
    if not is_class:
        raise ConfigurationError(
            f"the checkpoint names the function {path} for {argument}: only classes are allowed,"
            f" unless you trust it: trust=[{path!r}]"
        )
    if types is not None and not issubclass(resolved, types):
        expected = " or ".join(kind.__name__ for kind in types)
        mistake = f"that is no {expected}" if types else "it takes no class"
        raise ConfigurationError(f"the checkpoint names {path} for {argument}: {mistake}")
    return resolved


def _check_trusted(name: str, path: str, argument: str, trusted: Sequence[str]) -> None:
    if not _is_in(name, (*ALWAYS_TRUSTED, *trusted)):
        package = name.split(".")[0]
        instead = "" if argument == "the algorithm" else f", or {argument_of(argument)}=..."
        of_name = "" if name == path else f" (which is {name})"
        raise ConfigurationError(
            f"the checkpoint needs {path}{of_name} for {argument},"
            " which is not loaded without your consent:"
            f" if you trust the code of {package}, give trust=[{package!r}]{instead}"
        )


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _import(path: str, argument: str) -> Any:
    """Return a module's attribute, or an attribute of a class in it."""
    parts = path.split(".")
    for length in (len(parts) - 1, len(parts) - 2):
        module = ".".join(parts[:length])
        if not module:
            break
        try:
            attribute: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not _is_in(module, [error.name]):
                raise  # a module that the trusted one needs
            continue
        for part in parts[length:]:
            is_module_in_module = inspect.ismodule(attribute) and part != parts[length]
            attribute = None if is_module_in_module else getattr(attribute, part, None)
        if attribute is not None:
            return attribute
    raise ConfigurationError(
        f"the checkpoint needs {path} for {argument}, and there is none: install it,"
        " put it on Python's path, or use the version of the code that wrote the checkpoint"
    )
