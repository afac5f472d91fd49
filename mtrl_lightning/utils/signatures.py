"""The parameters of constructors and factories.

A factory is a class, a ``functools.partial`` of one, or a function.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any


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
