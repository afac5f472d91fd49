"""Functions, classes and their arguments as text that is the same in every process."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import numpy as np

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""A memory address in a ``repr``, which differs from process to process."""


def callable_name(value: Any) -> str:
    """Name a function or class; of a ``functools.partial`` also the arguments."""
    if isinstance(value, functools.partial):
        return f"{callable_name(value.func)} {values_text([*value.args, value.keywords])}"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def values_text(values: Any) -> str:
    """Return values as JSON; functions and classes by their names, other objects by their values.

    An object's values are those of its ``repr``. One without a ``repr`` of its own is named by its
    class.
    """
    return json.dumps(values, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(map(values_text, value))  # whose order differs from process to process
    is_named = hasattr(value, "__qualname__") or isinstance(value, functools.partial)
    text = repr(value)
    return callable_name(value) if is_named or ADDRESS.search(text) else text
