"""Validate and convert the values returned by an environment's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError

LARGEST = float(np.finfo(np.float32).max)
"""Largest finite number in single precision, in which observations and rewards are stored."""
LARGEST_SQUARE = LARGEST**2
FIX = ", which is not finite in single precision: fix the environment or its actions"


def read_flag(name: str, value: Any) -> bool:
    """Return a value as a boolean.

    Args:
        name: name of the value, for the error message.
        value: True, False, 1, 0, or an array of one element.
    """
    if isinstance(value, (bool, np.bool_, int, float)) and value in (0, 1):
        return bool(value)
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf" or array.item() not in (0, 1):
        raise ConfigurationError(f"{name} is {value!r}: return True or False, or 1 or 0")
    return bool(array.item())


def read_success(info: Mapping[str, Any]) -> bool:
    """Return the success reported by a step; False if it reports none."""
    return read_flag("info['success']", info.get("success", False))


def read_reward(value: Any) -> float:
    """Return a reward, possibly in an array, as a float.

    Raises:
        EnvironmentFaultError: if it is not finite in single precision.
    """
    if not isinstance(value, float):
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise ConfigurationError(f"the reward is {value!r}: return one number")
        value = float(array.item())
    if not abs(value) <= LARGEST:
        raise EnvironmentFaultError(f"the reward is {value}{FIX}")
    return value


def write_array(name: str, row: npt.NDArray, value: Any) -> None:
    """Write numbers to a row of an array.

    Args:
        name: name of the numbers, for the error message.
        row: a view of the row.
        value: the numbers.

    Raises:
        EnvironmentFaultError: if they are not finite.
    """
    array = np.asarray(value)
    kind = array.dtype.kind
    if array.shape != row.shape or (kind == "f" and row.dtype.kind != "f"):
        raise ConfigurationError(
            f"{name} has shape {array.shape} and dtype {array.dtype}, but the benchmark's spec has"
            f" {row.shape} and {row.dtype}: make them agree, for example with envs.pad_to_spec"
        )
    if kind == "f":
        check_finite(name, array)
    row[...] = array


def check_finite(name: str, array: npt.NDArray) -> None:
    """Check that floating-point numbers are finite in single precision.

    Raises:
        EnvironmentFaultError: if any are not; the message contains the first of them.
    """
    if array.ndim == 1 and float(array.dot(array)) <= LARGEST_SQUARE:
        return  # a cheaper test first; if squares overflow, the numbers may still be finite
    is_wrong = ~(np.abs(array) <= LARGEST)
    if is_wrong.any():
        wrong, indices = array[is_wrong][:5].tolist(), np.flatnonzero(is_wrong)[:5].tolist()
        raise EnvironmentFaultError(f"{name} is {wrong} at {indices}{FIX}")
