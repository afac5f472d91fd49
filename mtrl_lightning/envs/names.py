"""Process-independent text representations of functions, classes and their arguments."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import numpy as np

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""A memory address in a ``repr``, which differs between processes."""


def callable_name(value: Any) -> str:
    """Return the name of a function or class, for a ``functools.partial`` with its arguments."""
    if isinstance(value, functools.partial):
        return f"{callable_name(value.func)} {values_text([*value.args, value.keywords])}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def values_text(values: Any) -> str:
    """Return values as JSON, with functions and classes represented by their names.

    Other objects are represented by their ``repr``, or by their class if they do not define one.
    """
    return json.dumps(values, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(map(values_text, value))  # whose order differs between processes
    is_named = hasattr(value, "__qualname__") or isinstance(value, functools.partial)
    text = repr(value)
    return callable_name(value) if is_named or ADDRESS.search(text) else text
