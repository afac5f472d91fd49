"""The charts of a comparison, and all of them as one plot."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrl_lightning.reports.charts import (
    STEPS,
    Chart,
    Curve,
    draw_chart,
    plain_text,
)
from mtrl_lightning.reports.comparison import Band, Bands, Comparison
from mtrl_lightning.reports.record import is_bounded
from mtrl_lightning.runs import replacing

TASK_COLUMNS = 5


def average_charts(comparison: Comparison, bands: Bands) -> list[Chart]:
    """Return the averages by env steps and, where they are known, by minutes."""
    charts = [_chart(comparison, comparison.metric, bands.average)]
    if all(curves.minutes_SN is not None for curves in comparison.curves.values()):
        charts.append(_chart(comparison, comparison.metric, bands.average, by_minutes=True))
    return charts


def profile_chart(comparison: Comparison, bands: Bands) -> Chart:
    """Return the share of runs and tasks above each threshold at the end."""
    curves = [
        Curve(label, bands.thresholds_K, band.value_N, index, band.bounds_N2)
        for index, (label, band) in enumerate(bands.profiles.items())
    ]
    return Chart("share above the threshold", curves, True, f"threshold of {comparison.metric}")


def task_charts(comparison: Comparison, bands: Bands) -> list[Chart]:
    """Return a chart of each task."""
    return [_chart(comparison, task, of_methods) for task, of_methods in bands.tasks.items()]


def _chart(
    comparison: Comparison, title: str, bands: Mapping[str, Band], by_minutes: bool = False
) -> Chart:
    """Return the methods' curves, by env steps or by the mean minutes of the seeds."""
    curves = []
    for index, (label, band) in enumerate(bands.items()):
        env_steps_N, scores_STN, minutes_SN = comparison.curves[label]
        x_N = minutes_SN.mean(0) if by_minutes and minutes_SN is not None else env_steps_N
        name = f"{label} ({len(scores_STN)} seeds)"
        curves.append(Curve(name, x_N, band.value_N, index, band.bounds_N2))
    xlabel = "minutes of training" if by_minutes else STEPS
    return Chart(title, curves, is_bounded(comparison.metric), xlabel)


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

    tasks = task_charts(comparison, bands) if by_task and len(comparison.tasks) > 1 else []
    num_rows = math.ceil(len(tasks) / TASK_COLUMNS)
    with plain_text():
        figure = Figure(figsize=(15, 4.4 + 2.6 * num_rows), layout="constrained")
        heights = [4.4, 2.6 * num_rows] if tasks else [4.4]
        parts = figure.subfigures(len(heights), squeeze=False, height_ratios=heights)[:, 0]
        _plot_averages(parts[0], comparison, bands)
        if tasks:
            all_axes = parts[1].subplots(num_rows, TASK_COLUMNS, squeeze=False).ravel()
            for axes, chart in zip(all_axes, tasks, strict=False):
                draw_chart(axes, chart)
                axes.set_title(chart.title, fontsize="medium")
                axes.set_xlabel("")
            for axes in all_axes[len(tasks) :]:
                axes.set_visible(False)
        with replacing(path) as unfinished:
            figure.savefig(unfinished, dpi=110)
    return path


def _plot_averages(part: Any, comparison: Comparison, bands: Bands) -> None:
    """Plot the averages, whose scale is the same, and the profiles at the end."""
    charts = average_charts(comparison, bands)
    by_steps, *others, profiles = part.subplots(1, len(charts) + 1, squeeze=False)[0]
    for axes, chart in zip([by_steps, *others], charts, strict=True):
        draw_chart(axes, chart)
    for axes in others:
        axes.sharey(by_steps)
    interval = ", 95 % interval" if comparison.has_intervals else ""
    by_steps.set_ylabel(f"{comparison.metric}, interquartile mean{interval}")
    draw_chart(profiles, profile_chart(comparison, bands))
    profiles.set(
        ylabel="share of runs and tasks above it",
        title=f"performance profile after {comparison.end:,} env steps",
    )
    part.legend(*by_steps.get_legend_handles_labels(), loc="outside upper left", ncols=3)
