"""Formatting of numbers and tables, for pages and printed tables."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = "-"
"""Placeholder for an unknown value."""
LARGE = 1_000
"""Numbers of at least this size have no decimals."""


def number(value: float | None, decimals: int = 2) -> str:
    """Format a number, large ones without decimals and small ones with two digits.

    Args:
        value: the number; None if unknown.
        decimals: decimals of numbers in between.
    """
    if value is None:
        return UNKNOWN
    is_small = 0 < abs(value) < 10.0 ** (1 - decimals)
    return f"{value:.2g}" if is_small else _fixed(value, decimals)


def with_interval(
    value: float | None, bounds: Sequence[float | None] | None, decimals: int = 2
) -> str:
    """Format a number and its interval, such as ``0.85 [0.80, 0.90]``, with equal decimals.

    Args:
        value: the number; None if unknown.
        bounds: lower and upper bound; None, or None for both, without an interval.
        decimals: decimals of numbers that are not large.
    """
    if value is None:
        return UNKNOWN
    ends = [value, *(end for end in bounds or () if end is not None)]
    if max(map(abs, ends)) >= LARGE:
        decimals = 0
    shown = _fixed(value, decimals)
    if bounds is None or bounds[0] is None or bounds[1] is None:
        return shown
    return f"{shown} [{_fixed(bounds[0], decimals)}, {_fixed(bounds[1], decimals)}]"


def _fixed(value: float, decimals: int) -> str:
    return f"{value:,.0f}" if abs(value) >= LARGE else f"{value:.{decimals}f}"


def whole(value: float | None) -> str:
    """Format a count, such as the number of environment steps."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Format a table as Markdown with aligned columns.

    Args:
        lines: texts of the cells; the first line is the header.
    """
    cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(cells[0]))]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |"
        for line in cells
    )


def text_table(lines: Sequence[Sequence[str]], num_texts: int = 0) -> str:
    """Format a table as text with aligned columns.

    Args:
        lines: texts of the cells; the first line is the header.
        num_texts: number of left-aligned columns on the left; the others are right-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < num_texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
