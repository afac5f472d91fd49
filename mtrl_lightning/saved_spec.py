"""An ``EnvSpec`` as plain values, in checkpoints and collections, and built from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.checks import count
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec, Field

MOST_NUMBERS = 1 << 24
"""Largest number of an observation's numbers: more than four color images of 1024 pixels."""
_DAMAGED = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions raised by values of unexpected types."""
LISTS_OF_SPEC = {
    "task_names",
    "train_tasks",
    "observation_sizes",
    "action_sizes",
    "info_fields",
    "info_keys",
}


def describe_spec(spec: EnvSpec) -> dict[str, Any]:
    """Return a spec as plain values."""
    return {name: _describe_spec_value(value) for name, value in spec._asdict().items()}


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


def rebuild_spec(described: Mapping[str, Any]) -> EnvSpec:
    """Build the spec that ``describe_spec`` described.

    Raises:
        ConfigurationError: if the values are not those of a spec.
    """
    try:
        values = {name: _rebuild_spec_value(value) for name, value in described.items()}
        for name in LISTS_OF_SPEC & values.keys():
            if not isinstance(values[name], tuple):
                raise TypeError(f"{name} is no list")
        fields = tuple(Field(*field) for field in values.pop("info_fields", ()))
        return EnvSpec(**values, info_fields=fields)
    except _DAMAGED as error:
        raise ConfigurationError(
            f"the checkpoint's tasks cannot be read ({error}): it is damaged; use another one"
        ) from error


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
