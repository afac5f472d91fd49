"""Checks of values that users and files give.

``at_least`` to ``one_of`` check the ranges of options. They have one message: ``discount is 1.5:
give a number from 0 to 1``. Each names the option by its keyword. None, by which an option is off,
passes ``at_least``, ``above`` and ``within``; they refuse NaN and all that is no number.

The functions from ``count`` on check values of files. A checkpoint is data that may be damaged, or
made to do harm: its values are checked before they choose an index, a size or a path. A function
that returns a value raises ``ConfigurationError`` if it is of another type or out of range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError

if TYPE_CHECKING:
    import numpy.typing as npt

HINT = "the file is damaged; continue from another checkpoint"
"""How a message about a value of a checkpoint ends."""
LARGEST_COUNT = 2**53
"""Above all counts of a run, and exact as a floating point number."""


def at_least(
    low: float, /, *, finite: bool = False, prefix: str = "", hint: str = "", **options: Any
) -> None:
    """Check that numbers are ``low`` or more.

    Args:
        low: the smallest number that is allowed.
        finite: whether infinity is refused.
        prefix: stands before the option's name, as in ``rollout.`` or ``CAGrad's ``.
        hint: stands after the range, as in ``, or null for all tasks``.
        options: the numbers by name.
    """
    allowed = f"a finite number of at least {low}" if finite else f"at least {low}"
    _check(lambda x: low <= x and (not finite or math.isfinite(x)), allowed, prefix, hint, options)


def above(
    low: float, /, *, finite: bool = False, prefix: str = "", hint: str = "", **options: Any
) -> None:
    """Check that numbers are above ``low``, and with ``finite`` that they are not infinite."""
    allowed = f"a finite number above {low}" if finite else f"a number above {low}"
    _check(lambda x: low < x and (not finite or math.isfinite(x)), allowed, prefix, hint, options)


def within(
    low: float,
    high: float,
    /,
    *,
    above_low: bool = False,
    below_high: bool = False,
    prefix: str = "",
    hint: str = "",
    **options: Any,
) -> None:
    """Check that numbers are from ``low`` to ``high``, without these themselves where so asked."""
    allowed = f"a number from {low} to {high}"
    if above_low or below_high:
        allowed = (
            f"a number {'above' if above_low else 'of at least'} {low}"
            f" and {'below' if below_high else 'at most'} {high}"
        )

    def is_within(number: float) -> bool:
        is_inside = low < number if above_low else low <= number
        return is_inside and (number < high if below_high else number <= high)

    _check(is_within, allowed, prefix, hint, options)


def increasing(*, prefix: str = "", **options: float) -> None:
    """Check that each number is above the one before it."""
    numbers = list(options.values())
    if not all(low < high for low, high in itertools.pairwise(numbers)):
        listed = ", ".join(f"{name} {value}" for name, value in options.items())
        raise ConfigurationError(f"{prefix}{listed}: give {' < '.join(options)}")


def one_of(
    choices: Collection[Any], /, *, prefix: str = "", hint: str = "", **options: Any
) -> None:
    """Check that values are among the choices."""
    for name, value in options.items():
        if value not in choices:
            names = ", ".join(map(str, choices))
            raise ConfigurationError(f"{prefix}{name} is {value!r}: give one of {names}{hint}")


def nearest_multiples(number: int, divisor: int) -> str:
    """Return the multiples of the divisor around a number that is none, for an error message."""
    below = max(0, number // divisor) * divisor
    return " or ".join(str(multiple) for multiple in (below, below + divisor) if multiple)


def _check(
    is_allowed: Callable[[Any], bool], allowed: str, prefix: str, hint: str, options: dict[str, Any]
) -> None:
    for name, value in options.items():
        if value is None:
            continue
        if not isinstance(value, Real) or not is_allowed(value):
            text = str(value) if isinstance(value, Real) else repr(value)
            raise ConfigurationError(f"{prefix}{name} is {text}: give {allowed}{hint}")


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


def flags(values: Any, name: str, length: int) -> list[bool]:
    """Return a list of true and false.

    Raises:
        ConfigurationError: if one is another value.
        ValueError: if it has another length.
    """
    found = [flag(value, name) for value in values]
    if len(found) != length:
        raise ValueError(f"{name} {values}")
    return found


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
    if array.dtype.kind == "b" and array.size and array.view("uint8").max() > 1:
        raise ValueError("a boolean is neither 0 nor 1")


def _wrong(name: str, value: Any, expected: str) -> ConfigurationError:
    is_short_integer = type(value) is int and value.bit_length() < 128
    is_short = value is None or type(value) in (bool, float) or is_short_integer
    shown = str(value) if is_short else f"a {type(value).__name__}"
    return ConfigurationError(f"the checkpoint's {name} is {shown}, not {expected}: {HINT}")
