"""Pages of HTML from one template: no script, nothing loaded from elsewhere, every text escaped."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mtrl_lightning.reports.charts import Chart, has_many_curves, html_line, svg_of
from mtrl_lightning.runs import replacing

REPORT = "report.html"
TEMPLATE = "report.html.jinja"
TREND_WIDTH = 100
TREND_HEIGHT = 20
MAX_TREND_POINTS = 50


class Trend(NamedTuple):
    """A cell of a table with a number and the curve that leads to it."""

    text: str
    lines: Sequence[str]
    """Points of each line, in units of the template's ``viewBox``."""


class Table(NamedTuple):
    """A table; its first line is the header."""

    lines: Sequence[Sequence[str | Trend]]
    num_texts: int = 1
    """Columns of text, on the left; columns of numbers follow."""


class Link(NamedTuple):
    """A text that leads to a file."""

    text: str
    path: str
    """Relative to the page, with slashes."""


class Details(NamedTuple):
    """A text that is shown when its title is clicked."""

    title: str
    text: str


class Section(NamedTuple):
    """A part of a page under its own heading; parts that are empty are left out."""

    title: str
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    shares: Sequence[tuple[str, float]] = ()
    """Names and shares between 0 and 1."""
    table: Table | None = None
    videos: Sequence[Link] = ()
    links: Sequence[Link] = ()
    details: Details | None = None


class Page(NamedTuple):
    """A whole page."""

    title: str
    facts: Sequence[str]
    """Lines below the title."""
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
    refresh_seconds: int = 0
    """After which a browser loads the page again; 0 for a page that is complete."""


class LegendEntry(NamedTuple):
    """A line of the charts and its name."""

    name: str
    border: str
    """The line as CSS has it."""


def render(page: Page) -> str:
    """Return a page as HTML."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = itertools.count(1)

    def draw(chart: Chart) -> str:
        """Return an SVG, whose texts are escaped by the XML writer."""
        return svg_of(chart, f"chart{next(numbers)}-")

    return environment.get_template(TEMPLATE).render(page=page, draw=draw, legend=legend)


def write_page(path: Path, page: Page) -> None:
    """Write a page that appears under its name only when it is complete."""
    with replacing(path) as unfinished:
        unfinished.write_text(render(page), encoding="utf-8")


def legend(charts: Sequence[Chart]) -> Iterator[LegendEntry]:
    """Yield the lines that a section's charts have in common, each name once."""
    several = [chart for chart in charts if len(chart.curves) > 1]
    seen: dict[str, str] = {}
    for chart in several:
        for curve in chart.curves:
            is_one_of_many = has_many_curves(chart) and curve.color_index is not None
            name = "each task: see the table of tasks" if is_one_of_many else curve.name
            seen.setdefault(
                name, html_line(None if is_one_of_many else curve.color_index, is_one_of_many)
            )
    for name, border in seen.items():
        yield LegendEntry(name, border)


def trend(text: str, values_N: npt.ArrayLike, low: float, high: float) -> Trend:
    """Return a number with its curve, whose points are equally far apart.

    Args:
        text: the number.
        values_N: the curve; a value that is not finite leaves a gap.
        low: the value at the lower edge.
        high: the value at the upper edge.
    """
    value_N = np.asarray(values_N, np.float64)
    if len(value_N) > MAX_TREND_POINTS:
        value_N = value_N[np.linspace(0, len(value_N) - 1, MAX_TREND_POINTS).round().astype(int)]
    x_N = np.linspace(0, TREND_WIDTH, len(value_N))
    y_N = TREND_HEIGHT * (1 - (value_N - low) / (high - low if high > low else 1.0))
    lines: list[list[str]] = [[]]
    for x, y in zip(x_N.tolist(), y_N.tolist(), strict=True):
        if np.isfinite(y):
            lines[-1].append(f"{x:.0f},{y:.1f}")
        else:
            lines.append([])
    return Trend(text, [" ".join(points) for points in lines if len(points) > 1])
