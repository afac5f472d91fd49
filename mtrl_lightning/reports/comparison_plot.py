"""The plot of a comparison: by env steps, by minutes, as profiles, and task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrl_lightning.reports.charts import (
    MARKED_POINTS,
    draw_band,
    format_axes,
    format_steps,
    line_style,
    plain_text,
)
from mtrl_lightning.reports.comparison import Band, Bands, Comparison, Curves
from mtrl_lightning.reports.record import is_bounded
from mtrl_lightning.runs import replacing

TASK_COLUMNS = 5


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

    with plain_text():
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
    is_score = is_bounded(comparison.metric)
    has_minutes = all(one.minutes_SN is not None for one in curves.values())
    all_axes = part.subplots(1, 3 if has_minutes else 2, squeeze=False)[0]
    by_steps = all_axes[0]
    profiles = all_axes[-1]
    _plot_bands(by_steps, curves, bands.average)
    by_steps.set(xlabel="environment steps, all tasks", ylabel=_label(comparison))
    format_axes(by_steps, is_score)
    format_steps(by_steps)
    if has_minutes:
        by_minutes = all_axes[1]
        for i, (label, one) in enumerate(curves.items()):
            band = bands.average[label]
            minutes_N = one.minutes_SN.mean(0)  # type: ignore[union-attr]
            draw_band(by_minutes, minutes_N, band, line_style(i, len(minutes_N)))
        by_minutes.set(xlabel="minutes of training, mean of the seeds")
        by_minutes.sharey(by_steps)
        format_axes(by_minutes, is_score)
    for i, band in enumerate(bands.profiles.values()):
        draw_band(profiles, bands.thresholds_K, band, line_style(i, MARKED_POINTS + 1))
    profiles.set(
        xlabel=f"threshold of {comparison.metric}",
        ylabel="share of runs and tasks above it",
        title=f"performance profile after {comparison.end:,} env steps",
    )
    format_axes(profiles, is_bounded=True)
    part.legend(*by_steps.get_legend_handles_labels(), loc="outside upper left", ncols=3)


def _plot_tasks(
    part: Any, comparison: Comparison, bands: Bands, tasks: list[str], num_rows: int
) -> None:
    all_axes = part.subplots(num_rows, TASK_COLUMNS, squeeze=False, sharex=True).ravel()
    for axes, task in zip(all_axes, tasks, strict=False):
        _plot_bands(axes, comparison.curves, bands.tasks[task])
        axes.set_title(task, fontsize="medium")
        format_axes(axes, is_bounded(comparison.metric))
        format_steps(axes)
    for axes in all_axes[len(tasks) :]:
        axes.set_visible(False)


def _plot_bands(axes: Any, curves: Mapping[str, Curves], bands: Mapping[str, Band]) -> None:
    for i, (label, band) in enumerate(bands.items()):
        one = curves[label]
        style = line_style(i, len(one.env_steps_N))
        draw_band(axes, one.env_steps_N, band, style, f"{label} ({len(one.scores_STN)} seeds)")


def _label(comparison: Comparison) -> str:
    bounds = ", 95 % interval" if comparison.has_intervals else ""
    return f"{comparison.metric}, interquartile mean{bounds}"
