"""The picture of a comparison: by env steps, by minutes, as profiles, and task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrl_lightning.reports.comparison import Band, Bands, Comparison, Curves
from mtrl_lightning.reports.record import is_bounded
from mtrl_lightning.runs import replacing

TASK_COLUMNS = 5
MARKED_POINTS = 40
"""A curve with more evaluations has no markers."""


def plot_comparison(comparison: Comparison, bands: Bands, path: Path, by_task: bool = True) -> Path:
    """Plot all methods on average and, if ``by_task``, on each task.

    Args:
        comparison: the methods and their curves.
        bands: what ``bands_of`` computed of them.
        path: of the PNG.
        by_task: whether each task has a plot of its own.

    Returns:
        The file's path.
    """
    from matplotlib.figure import Figure  # takes a second to import

    tasks = list(comparison.tasks) if by_task and len(comparison.tasks) > 1 else []
    num_rows = math.ceil(len(tasks) / TASK_COLUMNS)
    figure = Figure(figsize=(15, 4.4 + 2.6 * num_rows), layout="constrained")
    if num_rows:
        parts: Any = figure.subfigures(2, height_ratios=[4.4, 2.6 * num_rows])
        upper, lower = parts
        _plot_tasks(lower, comparison, bands, tasks, num_rows)
    else:
        upper = figure.subfigures()
    _plot_averages(upper, comparison, bands)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=110)
    return path


def _plot_averages(part: Any, comparison: Comparison, bands: Bands) -> None:
    """Plot the averages by env steps and by minutes, and the profiles at the end."""
    curves = comparison.curves
    has_minutes = all(one.minutes_SN is not None for one in curves.values())
    all_axes = part.subplots(1, 3 if has_minutes else 2, squeeze=False)[0]
    by_steps = all_axes[0]
    profiles = all_axes[-1]
    _plot_bands(by_steps, curves, bands.average)
    by_steps.set(xlabel="environment steps, all tasks", ylabel=_label(comparison))
    format_steps(by_steps)
    shown = [by_steps, profiles]
    if has_minutes:
        by_minutes = all_axes[1]
        for i, (label, one) in enumerate(curves.items()):
            value_N, bounds_N2 = bands.average[label]
            minutes_N = one.minutes_SN.mean(0)  # type: ignore[union-attr]
            draw_band(by_minutes, minutes_N, Band(value_N, bounds_N2), line_style(i, len(value_N)))
        by_minutes.set(xlabel="minutes of training, mean of the seeds")
        by_minutes.sharey(by_steps)
        shown.append(by_minutes)
    for i, band in enumerate(bands.profiles.values()):
        draw_band(profiles, bands.thresholds_K, band, line_style(i, MARKED_POINTS + 1))
    profiles.set(
        xlabel=f"threshold of {comparison.metric}",
        ylabel="share of runs and tasks above it",
        title=f"performance profile after {comparison.end:,} env steps",
        ylim=(-0.03, 1.03),
    )
    for axes in shown:
        axes.grid(alpha=0.3)
    if is_bounded(comparison.metric):
        by_steps.set_ylim(-0.03, 1.03)
    part.legend(*by_steps.get_legend_handles_labels(), loc="outside upper left", ncols=3)


def _plot_tasks(
    part: Any, comparison: Comparison, bands: Bands, tasks: list[str], num_rows: int
) -> None:
    all_axes = part.subplots(num_rows, TASK_COLUMNS, squeeze=False, sharex=True).ravel()
    for axes, task in zip(all_axes, tasks, strict=False):
        _plot_bands(axes, comparison.curves, bands.tasks[task])
        axes.set_title(task, fontsize="medium")
        axes.grid(alpha=0.3)
        format_steps(axes)
        if is_bounded(comparison.metric):
            axes.set_ylim(-0.03, 1.03)
    for axes in all_axes[len(tasks) :]:
        axes.set_visible(False)


def _plot_bands(axes: Any, curves: Mapping[str, Curves], bands: Mapping[str, Band]) -> None:
    for i, (label, band) in enumerate(bands.items()):
        one = curves[label]
        style = line_style(i, len(one.env_steps_N))
        draw_band(axes, one.env_steps_N, band, style, f"{label} ({len(one.scores_STN)} seeds)")


def draw_band(
    axes: Any, x_N: Any, band: Band, style: dict[str, Any], label: str | None = None
) -> None:
    """Draw a line with its interval.

    Args:
        axes: to draw into.
        x_N: where the values are.
        band: the values and their bounds.
        style: of ``line_style``.
        label: in the legend.
    """
    axes.plot(x_N, band.value_N, label=label, **style)
    if band.bounds_N2 is not None:
        low_N, high_N = band.bounds_N2.T
        axes.fill_between(x_N, low_N, high_N, color=style["color"], alpha=0.15, linewidth=0)


def line_style(place: int, num_points: int) -> dict[str, Any]:
    """Return the color and line of the method at a place; three rounds of ten are distinct."""
    return {
        "marker": "." if num_points <= MARKED_POINTS else "",
        "linestyle": ("-", "--", ":")[place // 10 % 3],
        "color": f"C{place % 10}",
    }


def format_steps(axes: Any) -> None:
    """Show environment steps as ``50k`` and ``1M``."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _label(comparison: Comparison) -> str:
    bounds = ", 95 % interval" if comparison.has_intervals else ""
    return f"{comparison.metric}, interquartile mean{bounds}"
