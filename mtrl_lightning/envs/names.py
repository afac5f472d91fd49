"""Functions, classes and their arguments as text that is the same in every process."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np


def callable_name(value: Any) -> str:
    """Name a function or class; of a ``functools.partial`` also the arguments."""
    if isinstance(value, functools.partial):
        return f"{callable_name(value.func)} {values_text([*value.args, value.keywords])}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def values_text(values: Any) -> str:
    """Return values as JSON; functions, classes and other objects by their names."""
    return json.dumps(values, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    return callable_name(value)
