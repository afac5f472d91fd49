"""Charts drawn by Matplotlib, which is imported late, as it takes a second."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.compare.record import ENV_STEPS
from mtrl_lightning.compare.statistics import Estimate
from mtrl_lightning.runs import replacing

COLORS = 10
"""Colors of Matplotlib's cycle, each used with every line style."""
LINE_STYLES = ("-", "--", ":")
MAX_NAMED_CURVES = len(LINE_STYLES) * COLORS + 1
"""A chart with more curves draws them thin and without names, behind the average."""
THIN = {"linewidth": 0.7, "alpha": 0.5}
COLUMNS = 3
"""Charts next to each other."""
WIDTH, HEIGHT = 3.9, 2.6
"""Inches of a chart."""
LEGEND_CHARACTERS = 45
"""Of the names in a legend for each column of charts."""
LEGEND_LINE = 0.2
"""Inches of a line of the legend."""
SETTINGS: Any = {
    "text.parse_math": False,  # a dollar sign in a name is one, and not the start of a formula
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.formatter.limits": (-3, 5),  # larger numbers would not fit beside the axes
    "font.size": 9,
}
MINUTES = "minutes of training"
"""The label of an x-axis of time; others are of steps."""


class Curve(NamedTuple):
    """A curve of a chart."""

    name: str
    x_N: npt.ArrayLike
    band: Estimate
    """Values ``[N]`` with their bounds, if they have some."""
    color_index: int | None = None
    """Of its color and line style; None for an average, which is thick and black."""


class Chart(NamedTuple):
    """Curves in the same axes."""

    title: str
    curves: Sequence[Curve]
    is_bounded: bool = False
    """Whether the values lie between 0 and 1."""
    xlabel: str = ENV_STEPS


def line_style(index: int) -> dict[str, Any]:
    """Return the color and line of the curve at an index; three rounds of ten are distinct."""
    return {
        "linestyle": LINE_STYLES[index // COLORS % len(LINE_STYLES)],
        "color": f"C{index % COLORS}",
    }


def save_png(charts: Sequence[Chart], path: Path, columns: int = COLUMNS) -> Path:
    """Draw charts next to each other into a PNG file, and return its path."""
    with replacing(path) as unfinished:
        _save(charts, unfinished, columns, dpi=90)
    return path


def png_uri(chart: Chart) -> str:
    """Return a chart without a legend as the address of an ``<img>``."""
    file = io.BytesIO()
    _save([chart], file, columns=1, dpi=180, has_legend=False)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _save(
    charts: Sequence[Chart], file: Any, columns: int, dpi: int, has_legend: bool = True
) -> None:
    """Draw charts in rows, with one legend for all above them."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = max(1, min(columns, len(charts)))
    num_rows = max(1, math.ceil(len(charts) / columns))
    with rc_context(SETTINGS):
        figure = Figure(layout="constrained")
        all_axes = figure.subplots(num_rows, columns, squeeze=False).ravel()
        legend: dict[str, Any] = {}
        for axes, chart in zip(all_axes, charts, strict=False):
            _draw(axes, chart)
            handles, names = axes.get_legend_handles_labels()
            legend |= dict(zip(names, handles, strict=True))
        for axes in all_axes[len(charts) :]:
            axes.remove()
        height = HEIGHT * num_rows
        if legend and has_legend:
            longest = max(map(len, legend))
            num_columns = max(1, columns * LEGEND_CHARACTERS // (longest + 8))
            figure.legend(
                legend.values(),
                legend.keys(),
                loc="outside upper left",
                ncols=num_columns,
                frameon=False,
            )
            height += LEGEND_LINE * math.ceil(len(legend) / num_columns)
        figure.set_size_inches(WIDTH * columns, height)
        figure.savefig(file, format="png", dpi=dpi)


def _draw(axes: Any, chart: Chart) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    num_curves = len(chart.curves)
    is_named = 1 < num_curves <= MAX_NAMED_CURVES
    for curve in chart.curves:
        if curve.color_index is None:
            style = {"color": "black", "linewidth": 2.2, "zorder": 3}
        else:
            style = line_style(curve.color_index)
            style |= {"linewidth": 1.3} if num_curves <= MAX_NAMED_CURVES else THIN
        # a marker is as long as ten points of a line: only a single point needs one
        marker = "." if np.size(curve.x_N) == 1 else ""
        is_average = curve.color_index is None and num_curves > 1
        label = curve.name if is_named or is_average else None
        axes.plot(curve.x_N, curve.band.value, label=label, marker=marker, **style)
        if curve.band.low is not None:
            low, high = curve.band.low, curve.band.high
            axes.fill_between(curve.x_N, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_title(chart.title, fontsize="medium")
    axes.set_xlabel(chart.xlabel)
    axes.grid(alpha=0.3)
    if chart.xlabel != MINUTES:  # steps are shown as 50k and 1M
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if chart.is_bounded:
        axes.set_ylim(-0.03, 1.03)
