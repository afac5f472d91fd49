"""Curves drawn by Matplotlib: what the PNG plots and the SVG charts of the pages share."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

COLORS = 10
"""Colors of Matplotlib's cycle, each used with every line style."""
LINE_STYLES = ("-", "--", ":")
MAX_NAMED_CURVES = 10
"""A chart of a page with more curves draws them thin and without names, behind the average."""
MAX_POINTS = 200
"""Points of a curve of a page beyond which only some are drawn."""
MAX_POINTS_OF_MANY = 60
"""The same where a chart has more curves than are named, which bounds the size of the page."""
SIZE = (4.4, 2.5)
"""Inches of a chart of a page, of 72 units each: a unit is about a pixel on a telephone."""
INK = "#010203"
"""Stands for the color of the page's text, which is not the same in its dark mode."""
INK_SETTINGS = dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
)
PLAIN_TEXT: Any = {"text.parse_math": False}
"""A dollar sign in a name is one, and not the start of a formula."""
SETTINGS: Any = {
    **INK_SETTINGS,
    **PLAIN_TEXT,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "font.family": "DejaVu Sans",  # the one that comes with Matplotlib; the page has its own
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mtrl_lightning",  # the same curves give the same file
}
STEPS = "environment steps"
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


class Curve(NamedTuple):
    """A curve of a chart."""

    name: str
    x_N: npt.ArrayLike
    y_N: npt.ArrayLike
    color_index: int | None = None
    """Of its color and line style; None for an average, in the color of the text."""
    bounds_N2: npt.NDArray[np.float64] | None = None


class Chart(NamedTuple):
    """A chart of a page."""

    title: str
    curves: Sequence[Curve]
    is_bounded: bool = False
    """Whether the values lie between 0 and 1."""
    xlabel: str = STEPS


def line_style(index: int) -> dict[str, Any]:
    """Return the color and line of the curve at an index; three rounds of ten are distinct."""
    return {
        "linestyle": LINE_STYLES[index // COLORS % len(LINE_STYLES)],
        "color": f"C{index % COLORS}",
    }


def plain_text() -> AbstractContextManager[None]:
    """Return a context in which names of tasks and methods are drawn as they are."""
    from matplotlib import rc_context  # takes a second to import

    return rc_context(PLAIN_TEXT)


def draw_band(
    axes: Any,
    x_N: npt.ArrayLike,
    band: tuple[npt.ArrayLike, npt.NDArray[np.float64] | None],
    style: dict[str, Any],
    label: str | None = None,
) -> None:
    """Draw a line and, where it has one, its interval.

    Args:
        axes: to draw into.
        x_N: where the values are.
        band: the values, and their bounds ``[N, 2]`` or None.
        style: of ``line_style``.
        label: in the legend.
    """
    value_N, bounds_N2 = band
    axes.plot(x_N, value_N, label=label, **style)
    if bounds_N2 is not None:
        low_N, high_N = bounds_N2.T
        axes.fill_between(x_N, low_N, high_N, color=style["color"], alpha=0.15, linewidth=0)


def format_steps(axes: Any) -> None:
    """Show environment steps as ``50k`` and ``1M``."""
    from matplotlib.ticker import EngFormatter, MaxNLocator  # takes a second to import

    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def has_many_curves(chart: Chart) -> bool:
    """Return whether a chart has more curves than are told apart."""
    return len(chart.curves) > MAX_NAMED_CURVES + 1


def html_line(index: int | None, is_one_of_many: bool = False) -> str:
    """Return a line of ``svg_of``'s charts as the border of an HTML element.

    Args:
        index: of the curve; None for an average.
        is_one_of_many: whether it is drawn thin.
    """
    from matplotlib.colors import to_hex

    if is_one_of_many:
        return "1px solid var(--faint)"
    if index is None:
        return "3px solid currentColor"
    style = line_style(index)
    kind = {"-": "solid", "--": "dashed", ":": "dotted"}[style["linestyle"]]
    return f"3px {kind} {to_hex(style['color'])}"


def draw_chart(axes: Any, chart: Chart, ink: str = "black") -> None:
    """Draw a chart without its title and legend.

    Args:
        axes: to draw into.
        chart: what is drawn.
        ink: the color of an average.
    """
    is_one_of_many = has_many_curves(chart)
    for curve in chart.curves:
        _draw_curve(axes, curve, is_one_of_many, ink)
    axes.set_xlabel(chart.xlabel)
    axes.grid(alpha=0.3)
    if chart.xlabel == STEPS:
        format_steps(axes)
    if chart.is_bounded:
        axes.set_ylim(-0.03, 1.03)


def _draw_curve(axes: Any, curve: Curve, is_one_of_many: bool, ink: str) -> None:
    x_N = np.asarray(curve.x_N)
    y_N = np.asarray(curve.y_N, np.float64)
    bounds_N2 = curve.bounds_N2
    most = MAX_POINTS_OF_MANY if is_one_of_many else MAX_POINTS
    if len(x_N) > most:
        shown = np.linspace(0, len(x_N) - 1, most).round().astype(int)
        x_N = x_N[shown]
        y_N = y_N[shown]
        bounds_N2 = None if bounds_N2 is None else bounds_N2[shown]
    if curve.color_index is None:
        style = {"color": ink, "linewidth": 2.2, "zorder": 3}
    else:
        style = line_style(curve.color_index)
        style |= {"linewidth": 0.7, "alpha": 0.5} if is_one_of_many else {"linewidth": 1.3}
    # a marker is as long as ten points of a line: only a single point needs one
    style["marker"] = "." if len(x_N) == 1 else ""
    draw_band(axes, x_N, (y_N, bounds_N2), style, curve.name)


def svg_of(chart: Chart, prefix: str) -> str:
    """Draw a chart as an ``<svg>`` element for a page.

    Args:
        chart: what is drawn. Its texts may be anything: they are never markup.
        prefix: of the element's ids, which differs between the charts of a page.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context(SETTINGS):
        figure = Figure(figsize=SIZE)
        axes = figure.add_axes((0.13, 0.19, 0.84, 0.77))
        draw_chart(axes, chart, INK)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=NO_METADATA)
    return _inline(file.getvalue(), prefix, chart.title)


def _inline(svg: str, prefix: str, title: str) -> str:
    """Return Matplotlib's file as an element of a page: no size, own ids, the page's colors."""
    root = ElementTree.fromstring(svg)
    used = set(re.findall(r"(?:url\(|href=\")#(\w+)", svg))
    for parent in list(root.iter()):
        parent.tag = parent.tag.rpartition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in parent.attrib.items()}
        parent.attrib.clear()
        for key, value in attributes.items():
            if key == "id":
                if value in used:
                    parent.set("id", prefix + value)
            else:
                parent.set(key, _attribute(key, value, prefix))
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", title)
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, prefix: str) -> str:
    if key == "href":
        return value.replace("#", f"#{prefix}")
    if key in ("d", "x", "y"):
        return re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.1f}", value).replace("\n", "")
    return value.replace("url(#", f"url(#{prefix}").replace(INK, "currentColor")
