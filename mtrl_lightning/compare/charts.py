"""Charts drawn with Matplotlib, which is imported lazily because the import takes a second."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.compare.record import ENV_STEPS, RunRecord, is_bounded, read_run
from mtrl_lightning.compare.statistics import Estimate
from mtrl_lightning.runs import replacing

CURVES = "curves.png"
COLORS = 10
"""Number of colors in Matplotlib's cycle, each combined with every line style."""
LINE_STYLES = ("-", "--", ":")
MAX_NAMED_CURVES = len(LINE_STYLES) * COLORS + 1
"""In charts with more curves, these are thin and unlabeled, behind the average."""
WIDTH, HEIGHT = 3.9, 2.6
"""Size of a chart in inches."""
LEGEND_CHARACTERS = 45
"""Characters of a legend line per column of charts."""
LEGEND_LINE = 0.2
"""Height of a legend line in inches."""
SETTINGS: Any = {
    "text.parse_math": False,  # dollar signs in names are no math
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
}


class Curve(NamedTuple):
    """A curve of a chart."""

    name: str
    x_N: npt.ArrayLike
    band: Estimate
    """Values ``[N]``, and their interval if any."""
    color_index: int | None = None
    """Index of color and line style; None for an average, drawn thick and black."""


class Chart(NamedTuple):
    """Curves on common axes."""

    title: str
    curves: Sequence[Curve]
    is_bounded: bool = False
    """Whether the values lie between 0 and 1."""
    xlabel: str = ENV_STEPS


def draw(charts: Sequence[Chart], columns: int = 3) -> Any:
    """Return a Matplotlib figure with the charts in rows and a common legend above them."""
    from matplotlib.figure import Figure

    columns = max(1, min(columns, len(charts)))
    num_rows = max(1, math.ceil(len(charts) / columns))
    figure = Figure(layout="constrained")
    all_axes = figure.subplots(num_rows, columns, squeeze=False).ravel()
    legend: dict[str, Any] = {}
    for axes, chart in zip(all_axes, charts, strict=False):
        _plot(axes, chart)
        handles, names = axes.get_legend_handles_labels()
        legend |= dict(zip(names, handles, strict=True))
    for axes in all_axes[len(charts) :]:
        axes.remove()
    height = HEIGHT * num_rows
    if legend:
        longest = max(map(len, legend))
        num_columns = max(1, columns * LEGEND_CHARACTERS // (longest + 8))
        handles, names = list(legend.values()), list(legend)
        figure.legend(handles, names, loc="outside upper left", ncols=num_columns, frameon=False)
        height += LEGEND_LINE * math.ceil(len(legend) / num_columns)
    figure.set_size_inches(WIDTH * columns, height)
    return figure


def _plot(axes: Any, chart: Chart) -> None:
    num_curves = len(chart.curves)
    is_named = num_curves <= MAX_NAMED_CURVES
    for curve in chart.curves:
        index = curve.color_index
        if index is None:
            style = {"color": "black", "linewidth": 2.2, "zorder": 3}
        else:
            line_style = LINE_STYLES[index // COLORS % len(LINE_STYLES)]
            style = {"color": f"C{index % COLORS}", "linestyle": line_style}
            style |= {"linewidth": 1.3} if is_named else {"linewidth": 0.7, "alpha": 0.5}
        # a single point would have no visible line
        marker = "." if np.size(curve.x_N) == 1 else ""
        label = curve.name if num_curves > 1 and (is_named or index is None) else None
        axes.plot(curve.x_N, curve.band.value, label=label, marker=marker, **style)
        if curve.band.low is not None:
            low, high = curve.band.low, curve.band.high
            axes.fill_between(curve.x_N, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_title(chart.title, fontsize="medium")
    axes.set_xlabel(chart.xlabel)
    axes.grid(alpha=0.3)
    if chart.is_bounded:
        axes.set_ylim(-0.03, 1.03)


def png(charts: Sequence[Chart], columns: int = 3) -> bytes:
    """Return charts as a PNG image."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context(SETTINGS):
        draw(charts, columns).savefig(file, format="png", dpi=110)
    return file.getvalue()


def plot_curves(run_folder: str | Path) -> Path:
    """Plot a run's evaluation metrics, per task and averaged, and return the plot's path.

    With several evaluated splits, each has a row, below a row that compares their averages.

    Args:
        run_folder: folder with ``metrics.jsonl``, in which ``curves.png`` is written.
    """
    charts = evaluation_charts(read_run(Path(run_folder)))
    num_quantities = len({chart.title.rpartition("/")[2] for chart in charts})
    path = Path(run_folder) / CURVES
    with replacing(path) as unfinished:
        unfinished.write_bytes(png(charts, columns=num_quantities))
    return path


def evaluation_charts(run: RunRecord) -> list[Chart]:
    """Return a chart per evaluation metric; with several splits, a comparison of them first."""
    metrics = run.evaluated()
    splits = sorted({metric.partition("/")[0] for metric in metrics})

    def chart(title: str, curves: dict[str, str], average: str | None = None) -> Chart:
        drawn = [
            Curve(name, run.curves[metric][0], Estimate(run.curves[metric][1]), index)
            for index, (name, metric) in enumerate(curves.items())
        ]
        if average in run.curves:
            steps, values = run.curves[average]
            drawn.append(Curve("average", steps, Estimate(values)))
        return Chart(title, drawn, is_bounded(title), run.step_unit)

    charts = []
    if len(splits) > 1:
        for quantity in dict.fromkeys(metric.partition("/")[2] for metric in metrics):
            averages = {split: f"{split}/{quantity}" for split in splits}
            known = {split: name for split, name in averages.items() if name in run.curves}
            charts.append(chart(quantity, known))
    for metric in sorted(metrics, key=lambda metric: metric.partition("/")[0]):
        of_tasks = {task: f"{metric}/{task}" for task in run.tasks_of(metric)}
        charts.append(chart(metric, of_tasks, average=metric))
    return charts
