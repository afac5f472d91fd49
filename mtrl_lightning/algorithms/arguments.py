"""Constructor arguments of an algorithm as plain values, and the algorithm rebuilt from them.

A factory is a class, a ``functools.partial`` of one, or a function.

Plain values are numbers, strings, lists and dictionaries, in the form of a configuration file: a
class is ``{"class_path": ...}``, and a ``functools.partial`` of it has its arguments in
``init_args``. The algorithm's own class is ``_class_path``, as in Lightning's hyperparameters.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import Network, TaskConditioning
from mtrl_lightning.spec import EnvSpec

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
"""Modules whose classes a checkpoint may use; the caller must trust any others explicitly."""


class KeepsArguments:
    """Keep the arguments with which an object's constructor is called, as plain values.

    Arguments that are not passed get the defaults of the class when it is rebuilt.
    """

    hyper_parameters: dict[str, Any]
    """The object's class and the passed arguments except the spec, as plain values."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return a new object, before any constructor runs."""
        built = super().__new__(cls)
        names = list(inspect.signature(cls.__init__).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments = {n: plain(v) for n, v in given.items() if not isinstance(v, EnvSpec)}
        vars(built)["hyper_parameters"] = {OWN_CLASS: class_path(cls), **arguments}
        return built


def plain(value: Any) -> Any:
    """Convert to plain values; the ``class_path`` of an object that cannot be imported is prose."""
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
    """Return the shortest import path of a class or function, or a description if it has none."""
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
        hyper_parameters: saved class and arguments of the algorithm.
        spec: the tasks.
        base: the class that the caller asked for, which is trusted.
        trust: further modules and packages, such as ``["mytasks"]``, whose classes and functions
            are trusted.
        overrides: constructor arguments that replace the saved ones.
    """
    own = hyper_parameters[OWN_CLASS]
    kind = base if own == class_path(base) else _imported(own, "the algorithm", trust)
    if not (inspect.isclass(kind) and issubclass(kind, base)):
        raise ConfigurationError(
            f"the checkpoint holds the algorithm {own}, which is not a {base.__name__}:"
            " call load_from_checkpoint of its own class, or load_policy"
        )
    arguments = {"spec": spec, **(overrides or {})}
    for name, value in hyper_parameters.items():
        if name not in {OWN_CLASS, *arguments}:
            arguments[name] = _built(value, name, trust)
    built: T = kind(**arguments)
    return built


def _built(value: Any, argument: str, trust: Sequence[str]) -> Any:
    """Return the value that ``plain`` has converted, with tuples as lists."""
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
    """Import the class at this path, or a function of a module that the caller trusts."""
    instead = f"pass {argument.split('.')[0].split('[')[0]}=... when you load it"
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
            f"the checkpoint needs {path} for {argument}, which cannot be imported ({error}): add"
            f" it to PYTHONPATH, use the code version that wrote the checkpoint, or {instead}"
        ) from error
    # a trusted module may also import names from other modules
    defined = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    _check_trusted(defined, argument, trust, instead)
    if not (inspect.isclass(found) or (inspect.isfunction(found) and _is_in(defined, trust))):
        raise ConfigurationError(
            f"the checkpoint uses {path} for {argument}, but only classes and functions of trusted"
            f" modules are allowed: pass trust=[{path!r}], or {instead}"
        )
    return found


def _check_trusted(name: str, argument: str, trust: Sequence[str], instead: str) -> None:
    if not _is_in(name, (*TRUSTED, *trust)):
        package = name.split(".")[0]
        raise ConfigurationError(
            f"the checkpoint needs {name} for {argument}, which is not trusted: if you trust the"
            f" code of {package}, pass trust=[{package!r}]; otherwise {instead}"
        )


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def short_name(class_path: str) -> str:
    """Return the name of a class without its module."""
    return class_path.rpartition(".")[2]


def summary(hyper_parameters: Mapping[str, Any]) -> str:
    """Return the classes of an algorithm and of its modules, such as ``SAC: actor MLP, ...``."""
    parts = [
        f"{name} {short_name(value[CLASS_PATH])}"
        for name, value in hyper_parameters.items()
        if isinstance(value, Mapping) and CLASS_PATH in value
    ]
    name = short_name(hyper_parameters[OWN_CLASS])
    return f"{name}: {', '.join(parts)}" if parts else name


def parameters_of(called: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters by name, with ``**options`` of a class replaced by its base's."""
    parameters = dict(inspect.signature(called).parameters)
    more = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]
    if not more or not inspect.isclass(called):
        return parameters
    _, base, *_ = (kind for kind in called.__mro__ if "__init__" in vars(kind))
    del parameters[more[0]]
    return {**parameters_of(base), **parameters}


def called_by(factory: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return the class or function that a factory calls, and its keyword arguments.

    A ``functools.partial`` with positional arguments is returned itself.
    """
    if not isinstance(factory, partial):
        return factory, {}
    if not factory.args:
        return factory.func, factory.keywords
    # jsonargparse gives partial(a function of its own, ..., class, **init_args)
    is_parsed = str(getattr(factory.func, "__module__", "")).split(".")[0] == "jsonargparse"
    return (factory.args[-1] if is_parsed else factory), factory.keywords


def with_conditioning(
    make_network: Callable[..., Network],
    conditioning: Callable[[EnvSpec], TaskConditioning] | None,
    spec: EnvSpec,
) -> Callable[..., Network]:
    """Return a factory that passes a task conditioning to the network unless it has its own.

    Args:
        make_network: ``(in_dim, out_dim, spec) -> Network``.
        conditioning: the task conditioning; None for the network's default.
        spec: the tasks.
    """
    made, options = called_by(make_network)
    if conditioning is None or options.get("conditioning") is not None:
        return make_network
    if "conditioning" in parameters_of(made):
        return partial(make_network, conditioning=conditioning)
    built = conditioning(spec)
    if built.out_dim == 0:
        return make_network
    raise ConfigurationError(
        f"{made.__name__} does not support task conditioning, but conditioning is"
        f" {type(built).__name__}: set model.init_args.conditioning to null, or choose another"
        " network"
    )
