"""Read values of a file: each of the type and in the range that it must have.

A checkpoint is data that may be damaged, or made to do harm: its values are checked before they
choose an index, a size or a path. A function that returns a value raises ``ConfigurationError`` if
it is another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError

FORMAT = 3
"""Version of the checkpoint's format."""
HINT = "the file is damaged; continue from another checkpoint"
"""How a message about a value of a checkpoint ends."""
LARGEST_COUNT = 2**53
"""Above all counts of a run, and exact as a floating point number."""


@contextmanager
def restoring(part: str) -> Iterator[None]:
    """Turn any exception of damaged values into one error that names the checkpoint's part.

    Args:
        part: the restored part, such as ``counters``.

    Raises:
        ConfigurationError: in place of any error but those of the package, the disk and the
            environments.
    """
    try:
        yield
    except (ConfigurationError, EnvironmentFaultError, OSError):
        raise
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        cause = f"{type(error).__name__}: {first_line[:200]}"
        raise ConfigurationError(
            f"the checkpoint's {part} cannot be restored ({cause}): {HINT}"
        ) from error


def count(value: Any, name: str, most: int = LARGEST_COUNT) -> int:
    """Return a whole number from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise _wrong(name, value, f"a whole number from 0 to {most:,}")
    return value


def integer(value: Any, name: str, most: int = LARGEST_COUNT) -> int:
    """Return a whole number from ``-most`` to ``most``."""
    if type(value) is not int or abs(value) > most:
        raise _wrong(name, value, f"a whole number from {-most:,} to {most:,}")
    return value


def flag(value: Any, name: str) -> bool:
    """Return true or false."""
    if type(value) is not bool:
        raise _wrong(name, value, "true or false")
    return value


def flags(values: Any, name: str, length: int) -> npt.NDArray[np.bool_]:
    """Return a list of true and false as an array.

    Raises:
        ConfigurationError: if one is another value.
        ValueError: if it has another length.
    """
    array = np.array([flag(value, name) for value in values], np.bool_)
    if array.shape != (length,):
        raise ValueError(f"{name} {values}")
    return array


def number(value: Any, name: str) -> float:
    """Return a number, which may be infinite or NaN."""
    if type(value) is int and abs(value) <= LARGEST_COUNT:
        return float(value)
    if type(value) is not float:
        raise _wrong(name, value, "a number")
    return value


def numbers(values: Any, name: str) -> dict[str, float]:
    """Return numbers by name."""
    if not isinstance(values, Mapping) or not all(type(key) is str for key in values):
        raise _wrong(name, values, "numbers by name")
    return {key: number(value, f"{name}.{key}") for key, value in values.items()}


def text(value: Any, name: str, most: int = 1000) -> str:
    """Return a text of at most ``most`` characters."""
    if type(value) is not str or len(value) > most:
        raise _wrong(name, value, f"a text of at most {most:,} characters")
    return value


def check_booleans(array: npt.NDArray) -> None:
    """Check that the bytes of booleans are 0 or 1, as NumPy relies on.

    Raises:
        ValueError: if they are not.
    """
    if array.dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise ValueError("a boolean is neither 0 nor 1")


def _wrong(name: str, value: Any, expected: str) -> ConfigurationError:
    is_short_integer = type(value) is int and value.bit_length() < 128
    is_short = value is None or type(value) in (bool, float) or is_short_integer
    shown = str(value) if is_short else f"a {type(value).__name__}"
    return ConfigurationError(f"the checkpoint's {name} is {shown}, not {expected}: {HINT}")
