"""An algorithm as the arguments of its constructor, in plain values, and built from them.

Plain values are numbers, strings, lists and dictionaries, in the form of a configuration file: a
class is ``{"class_path": ...}``, and ``functools.partial`` of one has its arguments in
``init_args``. The algorithm's own class is ``_class_path``, as in Lightning's hyper-parameters.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.utils.signatures import called_by

T = TypeVar("T")
OWN_CLASS = "_class_path"
CLASS_PATH = "class_path"
INIT_ARGS = "init_args"
TRUSTED = (
    "mtrl_lightning.algorithms",
    "mtrl_lightning.auxiliaries",
    "mtrl_lightning.gradients",
    "mtrl_lightning.updates",
    "mtrl_lightning.networks",
    "torch.nn",
    "torch.optim",
)
"""Modules whose classes a checkpoint may name; other modules only where the caller trusts them."""


class KeepsArguments:
    """Keep the arguments that an object's constructor is called with, as plain values.

    What this constructor passes on to those of base classes follows from them. Arguments that are
    not given have the defaults of the class that is built later.
    """

    hyper_parameters: dict[str, Any]
    """The object's class and the given arguments but the spec, as plain values."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a new object, before any constructor runs."""
        built = super().__new__(cls)
        names = list(inspect.signature(cls.__init__).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments = {n: plain(v) for n, v in given.items() if not isinstance(v, EnvSpec)}
        vars(built)["hyper_parameters"] = {OWN_CLASS: class_path(cls), **arguments}
        return built


def plain(value: Any) -> Any:
    """Return a value as plain values; a ``class_path`` in words is of what cannot be imported."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    called, keywords = called_by(value)
    arguments = {INIT_ARGS: plain(keywords)} if keywords else {}
    return {CLASS_PATH: class_path(called), **arguments}


def class_path(called: Any) -> str:
    """Return the shortest path that imports a class or function; words if there is none."""
    name = getattr(called, "__qualname__", None)
    if name is None:
        return f"an object of {type(called).__module__}.{type(called).__qualname__}"
    packages = str(called.__module__).split(".")
    for length in range(min(2, len(packages)), len(packages) + 1):
        package = ".".join(packages[:length])
        if getattr(sys.modules.get(package), name, None) is called:
            return f"{package}.{name}"
    return f"the local {called.__module__}.{name}"


def rebuild(
    hyper_parameters: Mapping[str, Any],
    spec: EnvSpec,
    base: type[T],
    trust: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> T:
    """Build the algorithm of a checkpoint, with new weights.

    Only classes are looked up, and all of them before one is called.

    Args:
        hyper_parameters: of the algorithm.
        spec: the tasks.
        base: the class that the caller asked for, which is trusted.
        trust: modules and packages, ``["mytasks"]``, whose classes and functions may be used too.
        overrides: arguments of the constructor in place of the saved ones.
    """
    own = hyper_parameters[OWN_CLASS]
    kind = base if own == class_path(base) else _imported(own, "the algorithm", trust)
    if not (inspect.isclass(kind) and issubclass(kind, base)):
        raise ConfigurationError(
            f"the checkpoint holds the algorithm {own}, which is no {base.__name__}:"
            " call load_from_checkpoint of its own class, or load_policy"
        )
    arguments = {"spec": spec, **(overrides or {})}
    for name, value in hyper_parameters.items():
        if name not in {OWN_CLASS, *arguments}:
            arguments[name] = _built(value, name, trust)
    built: T = kind(**arguments)
    return built


def _built(value: Any, argument: str, trust: Sequence[str]) -> Any:
    """Return the value that ``plain`` is of, with tuples as lists."""
    if isinstance(value, list):
        return [_built(item, f"{argument}[{i}]", trust) for i, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    if CLASS_PATH not in value:
        return {name: _built(item, f"{argument}.{name}", trust) for name, item in value.items()}
    called = _imported(value[CLASS_PATH], argument, trust)
    keywords = _built(value.get(INIT_ARGS, {}), argument, trust)
    return partial(called, **keywords) if keywords else called


def _imported(path: str, argument: str, trust: Sequence[str]) -> Any:
    """Return the class of this path; a function only of a module that the caller trusts."""
    instead = f"give {argument.split('.')[0].split('[')[0]}=... when you load it"
    if argument == "the algorithm":
        instead = "call load_from_checkpoint of the class itself"
    module, _, name = path.rpartition(".")
    if not all(part.isidentifier() and not part.startswith("__") for part in path.split(".")):
        raise ConfigurationError(f"the checkpoint cannot rebuild {argument}, {path}: {instead}")
    _check_trusted(path, argument, trust, instead)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"the checkpoint needs {path} for {argument}, and there is none ({error}): put it on"
            f" Python's path, use the version of the code that wrote the checkpoint, or {instead}"
        ) from error
    # a trusted module also has names that it imports from others
    defined = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    _check_trusted(defined, argument, trust, instead)
    if not (inspect.isclass(found) or (inspect.isfunction(found) and _is_in(defined, trust))):
        raise ConfigurationError(
            f"the checkpoint names {path} for {argument}: only classes are allowed, and functions"
            f" of modules that you trust: give trust=[{path!r}], or {instead}"
        )
    return found


def _check_trusted(name: str, argument: str, trust: Sequence[str], instead: str) -> None:
    if not _is_in(name, (*TRUSTED, *trust)):
        package = name.split(".")[0]
        raise ConfigurationError(
            f"the checkpoint needs {name} for {argument}, which is not loaded without your consent:"
            f" if you trust the code of {package}, give trust=[{package!r}], or {instead}"
        )


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def short_name(class_path: str) -> str:
    """Return the name of a class without its module."""
    return class_path.rpartition(".")[2]


def summary(hyper_parameters: Mapping[str, Any]) -> str:
    """Return the classes of an algorithm and of its given parts, as ``SAC: actor MLP, ...``."""
    parts = [
        f"{name} {short_name(value[CLASS_PATH])}"
        for name, value in hyper_parameters.items()
        if isinstance(value, Mapping) and CLASS_PATH in value
    ]
    return f"{short_name(hyper_parameters[OWN_CLASS])}: {', '.join(parts)}"
