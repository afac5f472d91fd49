"""The parameters of constructors, with those that they inherit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any


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
