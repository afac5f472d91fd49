"""The arguments of constructors: recorded when an object is built, looked up, and checked.

A factory builds a part: a class, ``functools.partial`` of one, or a function.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from torch import nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod

_RECORDED = "_constructor_calls"
"""The attribute that holds the calls while an object is being built."""
_REPLACED = ("observation_space", "num_tasks", "action_dim")
"""Parameters of factories up to version 0.2, which the spec has replaced."""
_Constructor = TypeVar("_Constructor", bound=Callable[..., None])


class _Call(NamedTuple):
    """A call of one class's constructor."""

    named: dict[str, Any]
    """The value of each parameter, defaults included, in the order of the signature."""
    defaults: frozenset[str]
    """Parameters that were not passed."""
    more: dict[str, Any] | None
    """Arguments that ``**kwargs`` received; None if the constructor has no ``**kwargs``."""


def record_arguments(constructor: _Constructor) -> _Constructor:
    """Return the constructor, which notes each call for ``recorded_arguments``."""
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        # calls are kept in the object, because its constructor may build another algorithm
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
    passed = set(bound.arguments)
    bound.apply_defaults()
    named = {}
    more = None
    for parameter in list(signature.parameters.values())[1:]:  # without self
        if parameter.kind is parameter.VAR_KEYWORD:
            more = bound.arguments[parameter.name]
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            named[parameter.name] = bound.arguments[parameter.name]
    return _Call(named, frozenset(named.keys() - passed), more)


def recorded_arguments(built: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of the constructors of an object that is being built.

    Call it in the base's constructor, and once.

    Returns:
        The arguments of its class, defaults and arguments passed on by ``**kwargs`` included; and
        the arguments of all of its constructors.
    """
    calls: list[_Call] = vars(built).pop(_RECORDED)  # from its own class's to the base's
    of_all = {name: value for call in reversed(calls) for name, value in call.named.items()}
    own_call = calls[0]
    passed_on = own_call.more or {}
    inherited = []
    for call, base_call in pairwise(calls):
        if call.more is None:
            break
        # arguments that a class sets for its base are not options of the class
        options = base_call.defaults | passed_on.keys()
        inherited.append({n: v for n, v in base_call.named.items() if n in options})
    own = {name: value for call in reversed(inherited) for name, value in call.items()}
    return {**own, **passed_on, **own_call.named}, {**of_all, **passed_on}


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
    called, keywords = called_by(factory)
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
        names = " and ".join(replaced)
        raise ConfigurationError(
            f"{option}: {called.__qualname__} takes {names}, and parts receive the spec in place"
            f" of {names} since 0.3: rename the parameter to spec and read {read}"
        )
    check_factories(called, keywords, option)
