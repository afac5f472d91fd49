"""Range checks of options.

Error messages have the form ``discount is 1.5: give a number from 0 to 1``. Options are passed as
keyword arguments. None, which disables an option, passes ``at_least``, ``above`` and ``within``;
NaN and values that are not numbers do not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from numbers import Real
from typing import Any

from mtrl_lightning.errors import ConfigurationError


def at_least(
    low: float, /, *, finite: bool = False, prefix: str = "", hint: str = "", **options: Any
) -> None:
    """Check that numbers are at least ``low``.

    Args:
        low: the smallest allowed number.
        finite: whether to reject infinity.
        prefix: text before the option's name in the message, such as ``data.`` or ``CAGrad's ``.
        hint: text after the range in the message, such as ``, or null for all tasks``.
        options: the numbers by name.
    """
    allowed = f"a finite number of at least {low}" if finite else f"at least {low}"
    _check(lambda x: low <= x and (not finite or math.isfinite(x)), allowed, prefix, hint, options)


def above(
    low: float, /, *, finite: bool = False, prefix: str = "", hint: str = "", **options: Any
) -> None:
    """Check that numbers are above ``low`` and, with ``finite``, not infinite."""
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
    """Check that numbers are from ``low`` to ``high``, optionally excluding the bounds."""
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
    """Return the multiples of the divisor next to a number, for an error message."""
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
