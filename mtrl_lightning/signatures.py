"""The parameters of constructors, with those that they inherit, and a record of their arguments.

From the recorded arguments a checkpoint's algorithm is rebuilt.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from mtrl_lightning.errors import ConfigurationError

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
    """Arguments that ``**kwargs`` received; None if the constructor has no ``**kwargs``."""


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
