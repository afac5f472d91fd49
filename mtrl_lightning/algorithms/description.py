"""An algorithm and its spec as plain values, and the algorithm built again from them.

A factory (a class, ``functools.partial`` of one, a function of a module) is described as
``{"class_path": ..., "init_args": {...}}``, whether it was given in Python or on the command line.
What has no name to import it by, such as a lambda, is described as ``{"cannot_rebuild": text}``.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import importlib
import inspect
import math
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gymnasium.spaces import Box
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.saved import count
from mtrl_lightning.schema import Field
from mtrl_lightning.spec import EnvSpec

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

_CLASS_PATH = "class_path"
_INIT_ARGS = "init_args"
_CANNOT_REBUILD = "cannot_rebuild"
_Types = tuple[type, ...] | None
"""Of which one a class has to be a subclass; None for any."""
MOST_NUMBERS = 1 << 24
"""Largest number of an observation's numbers: more than four color pictures of 1024 pixels."""
_DAMAGED = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What values of other types than expected raise."""
_SCRIPTS = ("__main__", "__mp_main__")
"""Names of the running script's module: another process has another module by this name."""

_RECORDED = "_constructor_calls"
"""The attribute that holds the calls while an object is being built."""
_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


class _Call(NamedTuple):
    """A call of one class's constructor."""

    named: dict[str, Any]
    """The value of each parameter, defaults included, in the order of the signature."""
    defaults: frozenset[str]
    """Parameters that were not passed."""
    more: dict[str, Any] | None
    """What ``**kwargs`` received; None if the constructor has none."""


def record_arguments(constructor: _Constructor) -> _Constructor:
    """Return the constructor, which notes each call for ``recorded_arguments``."""
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        # in the object itself: another one, built by this constructor, has its own calls
        calls = vars(self).setdefault(_RECORDED, [])
        fixed = [name for name in type(self).fixed_options if name in kwargs]
        if fixed and not calls:
            raise ConfigurationError(
                f"{type(self).__name__} takes no option {', '.join(fixed)}: it sets it itself"
            )
        lacking = type(self).lacking_options
        for name in kwargs.keys() & lacking.keys():
            raise ConfigurationError(f"{type(self).__name__} has no {name}: {lacking[name]}")
        calls.append(_bind(signature, self, args, kwargs))
        constructor(self, *args, **kwargs)

    return recorded  # type: ignore[return-value]


def _bind(
    signature: inspect.Signature, self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Call:
    try:
        bound = signature.bind(self, *args, **kwargs)
    except TypeError:
        # an option that ``**kwargs`` passed on: the error names the class that was given it
        for name in kwargs.keys() - signature.parameters.keys():
            raise TypeError(
                f"{type(self).__qualname__}.__init__() got an unexpected keyword argument {name!r}"
            ) from None
        return _Call({}, frozenset(), None)  # the constructor raises one that names it
    given = set(bound.arguments)
    bound.apply_defaults()
    named = {}
    more = None
    for parameter in list(signature.parameters.values())[1:]:  # without self
        if parameter.kind is parameter.VAR_KEYWORD:
            more = bound.arguments[parameter.name]
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            named[parameter.name] = bound.arguments[parameter.name]
    return _Call(named, frozenset(named.keys() - given), more)


def recorded_arguments(built: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the constructors of an object that is being built were called with.

    Call it in the base's constructor, and once.

    Returns:
        The arguments that its class takes, defaults included, among them those that ``**kwargs``
        passes on to a base; and the arguments of all of its constructors.
    """
    calls: list[_Call] = vars(built).pop(_RECORDED)  # from its own class's to the base's
    of_all = {name: value for call in reversed(calls) for name, value in call.named.items()}
    own_call = calls[0]
    passed_on = own_call.more or {}
    inherited = []
    for call, base_call in pairwise(calls):
        if call.more is None:
            break
        # what a class passes to its base by itself is no option of the class
        options = base_call.defaults | passed_on.keys()
        inherited.append({n: v for n, v in base_call.named.items() if n in options})
    own = {name: value for call in reversed(inherited) for name, value in call.items()}
    return {**own, **passed_on, **own_call.named}, {**of_all, **passed_on}


def describe_algorithm(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Describe an algorithm by its class and the arguments of its constructor, defaults included.

    Args:
        kind: the algorithm's class.
        given: all arguments of the constructor by name; the spec is left out.
    """
    arguments = {name: value for name, value in given.items() if not isinstance(value, EnvSpec)}
    path = import_path(kind) or _qualified_name(kind)
    return {_CLASS_PATH: path, _INIT_ARGS: _describe_arguments(arguments, parameters_of(kind))}


def summarize(description: Mapping[str, Any]) -> str:
    """Return the classes of a described algorithm and of its parts, as ``SAC: actor MLP, ...``."""
    parts = [
        f"{name} {_short_name(value)}"
        for name, value in description[_INIT_ARGS].items()
        if isinstance(value, Mapping) and _CLASS_PATH in value
    ]
    return f"{_short_name(description)}: {', '.join(parts)}"


def _short_name(description: Mapping[str, Any]) -> str:
    return str(description[_CLASS_PATH]).rsplit(".", 1)[-1]


def cannot_rebuild(described: Any, argument: str = "") -> dict[str, str]:
    """Return the arguments, such as ``actor.conditioning``, that a description has no class of.

    Args:
        described: the described arguments by name, or a part of them.
        argument: where the part is.

    Returns:
        What each of them was, in words, by the argument's name.
    """
    if isinstance(described, Mapping):
        if set(described) == {_CANNOT_REBUILD}:
            return {argument: str(described[_CANNOT_REBUILD])}
        inner = described.get(_INIT_ARGS, {}) if _CLASS_PATH in described else described
        parts = [(f"{argument}.{name}" if argument else name, v) for name, v in inner.items()]
    elif isinstance(described, (list, tuple)):
        parts = [(f"{argument}[{place}]", value) for place, value in enumerate(described)]
    else:
        parts = []
    found: dict[str, str] = {}
    for where, value in parts:
        found |= cannot_rebuild(value, where)
    return found


def warn_of_unknown(unknown: Mapping[str, str]) -> None:
    """Warn of arguments that a checkpoint cannot rebuild, as ``cannot_rebuild`` returns them."""
    for argument, text in unknown.items():
        rank_zero_warn(
            f"a checkpoint cannot rebuild {argument}, {text},"
            " because no module has it under that name:"
            f" give {_argument(argument)}=... to load_policy and load_from_checkpoint,"
            " or define it in a module"
        )


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
    given = dict(overrides or {})
    trusted = (trust,) if isinstance(trust, str) else tuple(trust)
    path, described = _parts(description, "the algorithm")
    is_base = path in (import_path(base), _qualified_name(base))
    kind: Any = base if is_base else _resolve(path, "the algorithm", trusted)
    if not (inspect.isclass(kind) and issubclass(kind, base)):
        raise ConfigurationError(
            f"the checkpoint holds the algorithm {path}, which is no {base.__name__}:"
            " call load_from_checkpoint of its own class, or load_policy"
        )
    _check_names(kind, given, "the overrides")
    kept = {name: value for name, value in described.items() if name not in given}
    _check_rebuildable(kept)
    arguments = _rebuild_arguments(kind, kept, "", trusted)
    spec = given.pop("spec", None)
    arguments["spec"] = rebuild_spec(state["spec"]) if spec is None else spec
    return kind(**arguments, **given)


def describe_spec(spec: EnvSpec) -> dict[str, Any]:
    """Return a spec as plain values."""
    return {name: _describe_spec_value(value) for name, value in spec._asdict().items()}


def rebuild_spec(described: Mapping[str, Any]) -> EnvSpec:
    """Build the spec that ``describe_spec`` described.

    Raises:
        ConfigurationError: if the values are not those of a spec.
    """
    try:
        values = {name: _rebuild_spec_value(value) for name, value in described.items()}
        fields = tuple(Field(*field) for field in values.pop("info_fields", ()))
        return EnvSpec(**values, info_fields=fields)
    except _DAMAGED as error:
        raise ConfigurationError(
            f"the checkpoint's tasks cannot be read ({error}): it is damaged; use another one"
        ) from error


def _describe_spec_value(value: Any) -> Any:
    if isinstance(value, Box):
        return {
            "low": _one_or_all(value.low),
            "high": _one_or_all(value.high),
            "shape": list(value.shape),
            "dtype": np.dtype(value.dtype).name,
        }
    if isinstance(value, Mapping):
        return {key: _describe_spec_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_describe_spec_value(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _one_or_all(bound: np.ndarray) -> Any:
    is_one = bound.size > 0 and bool((bound == bound.flat[0]).all())
    return bound.flat[0].item() if is_one else bound.tolist()


def _rebuild_spec_value(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"low", "high", "shape", "dtype"}:
        shape = tuple(count(size, "size of a space", MOST_NUMBERS) for size in value["shape"])
        if math.prod(shape) > MOST_NUMBERS:
            raise ValueError(f"a space of the shape {shape}")
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"a space of the type {dtype}")
        low = np.broadcast_to(np.asarray(value["low"], dtype), shape)
        high = np.broadcast_to(np.asarray(value["high"], dtype), shape)
        return Box(low, high, shape, dtype.type)
    if isinstance(value, list):
        return tuple(_rebuild_spec_value(item) for item in value)
    return value


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
        return {_CANNOT_REBUILD: _in_words(value)}
    parameters = parameters_of(called)
    arguments = _describe_arguments(given, parameters)
    if not _is_of_torch(called):  # its optimizers have many options
        defaults = _describe_defaults(parameters)
        arguments |= {name: value for name, value in defaults.items() if name not in given}
    return {_CLASS_PATH: path, _INIT_ARGS: arguments} if arguments else {_CLASS_PATH: path}


def _is_plain_mapping(value: Mapping[Any, Any]) -> bool:
    names_are_text = all(type(name) is str for name in value)
    return names_are_text and not {_CLASS_PATH, _CANNOT_REBUILD} & set(value)


def called_by(factory: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return what a factory calls, None if that is not known, and with which keyword arguments."""
    if not isinstance(factory, partial):
        return factory, {}
    if not factory.args:
        called, given = called_by(factory.func)
        return called, {**given, **factory.keywords}
    # jsonargparse gives partial(its own function, ..., class, **init_args) for a class in YAML
    function = factory.func
    module = function.__module__ if inspect.isfunction(function) else type(function).__module__
    is_from_yaml = module.split(".")[0] == "jsonargparse" and inspect.isclass(factory.args[-1])
    return (factory.args[-1] if is_from_yaml else None), factory.keywords


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


def parameters_of(called: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters by name; ``**kwargs`` of a class are those of its base."""
    try:
        parameters = dict(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # written in C
        return {}
    more = [name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD]
    if not more or not inspect.isclass(called):
        return parameters
    _, base, *_ = (kind for kind in called.__mro__ if "__init__" in vars(kind))
    if base is object:
        return parameters
    del parameters[more[0]]
    fixed = getattr(called, "fixed_options", ())
    inherited = {name: p for name, p in parameters_of(base).items() if name not in fixed}
    return {**inherited, **parameters}


def _is_of_torch(called: Any) -> bool:
    return called.__module__.split(".")[0] == "torch"


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
    if module in _SCRIPTS or not _is_name(f"{module}.{name}"):
        return None
    packages = module.split(".")
    for length in range(min(2, len(packages)), len(packages) + 1):
        package = ".".join(packages[:length])
        found: Any = sys.modules.get(package)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found == called:
            return f"{package}.{name}"
    return None


def _is_name(path: str) -> bool:
    parts = path.split(".")
    return len(parts) > 1 and all(p.isidentifier() and not p.startswith("__") for p in parts)


def _in_words(value: Any) -> str:
    called, _ = called_by(value)
    if inspect.isclass(called) or inspect.isroutine(called):
        kind = "class" if inspect.isclass(called) else "function"
        return f"the {kind} {_qualified_name(called)}"
    if isinstance(value, partial):
        return "a functools.partial with positional arguments"
    return f"an object of {_qualified_name(type(value))}"


def _qualified_name(called: Any) -> str:
    return f"{called.__module__}.{called.__qualname__}"


def _check_rebuildable(described: Mapping[str, Any]) -> None:
    unknown = cannot_rebuild(described)
    if unknown:
        names = dict.fromkeys(_argument(name) for name in unknown)
        lost = ", ".join(f"{name} ({text})" for name, text in unknown.items())
        raise ConfigurationError(
            f"the checkpoint cannot rebuild {lost}:"
            f" give {', '.join(f'{name}=...' for name in names)} when you load it"
        )


def _argument(name: str) -> str:
    """Return the constructor's argument of a nested one: ``actor`` of ``actor.conditioning``."""
    return name.split(".")[0].split("[")[0]


def _parts(described: Any, argument: str) -> tuple[str, Mapping[str, Any]]:
    """Return class path and arguments.

    Raises:
        ConfigurationError: if the description is none.
    """
    path = None
    arguments = None
    if isinstance(described, Mapping) and set(described) <= {_CLASS_PATH, _INIT_ARGS}:
        path = described.get(_CLASS_PATH)
        arguments = described.get(_INIT_ARGS, {})
    if not isinstance(path, str) or not isinstance(arguments, Mapping):
        raise ConfigurationError(
            f"the checkpoint's description of {argument} cannot be read: it is damaged; use another"
        )
    return path, arguments


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
    if _CLASS_PATH not in value:
        return {n: _rebuild(v, f"{argument}.{n}", trusted, types) for n, v in value.items()}
    path, described = _parts(value, argument)
    called = _resolve(path, argument, trusted, types)
    arguments = _rebuild_arguments(called, described, argument, trusted)
    return partial(called, **arguments) if arguments else called


def _resolve(
    path: str, argument: str, trusted: Sequence[str], types: _Types = None
) -> Callable[..., Any]:
    """Return the class of this name; a function only of a module that the caller trusts.

    Raises:
        ConfigurationError: if it may not be used, or there is none; nothing is imported before
            its name is allowed.
    """
    if not _is_name(path):
        is_algorithm = argument == "the algorithm"
        own = "call load_from_checkpoint of the class itself, LoadedPolicy takes what it returns"
        remedy = own if is_algorithm else f"give {_argument(argument)}=..."
        raise ConfigurationError(
            f"the checkpoint needs {path!r} for {argument}, which no module has: {remedy}"
        )
    _check_trusted(path, path, argument, trusted)
    found = _import(path, argument)
    if not (inspect.isclass(found) or inspect.isfunction(found) or inspect.ismethod(found)):
        raise ConfigurationError(
            f"the checkpoint names {path} for {argument}: that is no class and no function"
        )
    own_path = _qualified_name(found)
    _check_trusted(own_path, path, argument, trusted)
    if _is_in(own_path, trusted):
        return found
    if not inspect.isclass(found):
        raise ConfigurationError(
            f"the checkpoint names the function {path} for {argument}: only classes are allowed,"
            f" unless you trust it: trust=[{path!r}]"
        )
    if types is not None and not issubclass(found, types):
        wanted = " or ".join(kind.__name__ for kind in types)
        mistake = f"that is no {wanted}" if types else "it takes no class"
        raise ConfigurationError(f"the checkpoint names {path} for {argument}: {mistake}")
    return found


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _check_trusted(name: str, path: str, argument: str, trusted: Sequence[str]) -> None:
    if not _is_in(name, (*ALWAYS_TRUSTED, *trusted)):
        package = name.split(".")[0]
        instead = "" if argument == "the algorithm" else f", or {_argument(argument)}=..."
        of_name = "" if name == path else f" (which is {name})"
        raise ConfigurationError(
            f"the checkpoint needs {path}{of_name} for {argument},"
            " which is not loaded without your consent:"
            f" if you trust the code of {package}, give trust=[{package!r}]{instead}"
        )


def _import(path: str, argument: str) -> Any:
    """Return a module's attribute, or an attribute of a class in it."""
    parts = path.split(".")
    for length in (len(parts) - 1, len(parts) - 2):
        module = ".".join(parts[:length])
        if not module:
            break
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not _is_in(module, [error.name]):
                raise  # a module that the trusted one needs
            continue
        for part in parts[length:]:
            is_module_in_module = inspect.ismodule(found) and part != parts[length]
            found = None if is_module_in_module else getattr(found, part, None)
        if found is not None:
            return found
    raise ConfigurationError(
        f"the checkpoint needs {path} for {argument}, and there is none: install it,"
        " put it on Python's path, or use the version of the code that wrote the checkpoint"
    )


def _check_names(called: Any, given: Mapping[Any, Any], where: str) -> None:
    """Check that a class takes arguments of these names.

    Raises:
        ConfigurationError: if it does not.
    """
    parameters = parameters_of(called)
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in given:
        if name not in parameters:
            near = difflib.get_close_matches(str(name), parameters, n=3)
            hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(parameters)}"
            raise ConfigurationError(
                f"{called.__qualname__} takes no argument {name!r}, which is in {where}: {hint}"
            )


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


def _built_types(annotation: Any) -> _Types:
    """Return what the factories of an annotation build: ``Network`` of ``Callable[..., Network]``.

    Returns:
        None if the annotation leaves it open; nothing if it takes no factory.
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
    found: tuple[type, ...] = ()
    for part in inner:
        types = _built_types(part)
        if types is None:
            return None
        found += types
    return found
