"""An ``EnvSpec`` as plain values, in checkpoints and collections, and built from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.spec import EnvSpec, Field


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
    """Build the spec that ``describe_spec`` described."""
    values = {name: _rebuild_spec_value(value) for name, value in described.items()}
    fields = tuple(Field(*field) for field in values.pop("info_fields"))
    return EnvSpec(**values, info_fields=fields)


def _rebuild_spec_value(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"low", "high", "shape", "dtype"}:
        shape = tuple(value["shape"])
        dtype = np.dtype(value["dtype"])
        low = np.broadcast_to(np.asarray(value["low"], dtype), shape)
        high = np.broadcast_to(np.asarray(value["high"], dtype), shape)
        return Box(low, high, shape, dtype.type)
    if isinstance(value, list):
        return tuple(_rebuild_spec_value(item) for item in value)
    return value
