"""comparison.png and report.html of a comparison: curves, tables and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from mtrl_lightning.reports.charts import MINUTES, Chart, Curve, save_png
from mtrl_lightning.reports.comparison import AVERAGE, Comparison, table, task_table
from mtrl_lightning.reports.record import is_bounded
from mtrl_lightning.reports.render import Page, Section

EXPLANATION = (
    "At the end and over training: interquartile mean over seeds and tasks, with its 95 %"
    " interval of a bootstrap that resamples the seeds of each task. P(better than the first): the"
    " probability that a run has a higher score at the end than one of the first method on the"
    " same task. Steps and minutes to the threshold: median of the seeds whose mean over tasks"
    " reached it."
)


def plot_comparison(comparison: Comparison, path: Path) -> Path:
    """Plot all methods on average and on each task into a PNG file, and return its path."""
    return save_png([*_average_charts(comparison), *_task_charts(comparison)], path)


def comparison_page(
    comparison: Comparison, rows: Sequence[Mapping[str, Any]], threshold: float | None
) -> Page:
    """Return the page of a comparison.

    Args:
        comparison: the methods and their curves.
        rows: returned by ``summarize``.
        threshold: with which it was called.
    """
    methods = comparison.methods
    unit = comparison.step_unit
    names = list(dict.fromkeys(name for method in methods for name in method.options))
    options = [["option", *(method.label for method in methods)]]
    options += [[n, *(str(method.options.get(n, "-")) for method in methods)] for n in names]
    runs = [["method", "seed", "run", unit]]
    runs += [
        [method.label, str(run.seed), str(run.folder), f"{run.env_steps:,}"]
        for method in methods
        for run in method.runs
    ]
    tasks = task_table(comparison)
    sections = [
        Section("Average over tasks", charts=_average_charts(comparison)),
        Section("Methods", EXPLANATION, table=table(rows, threshold, unit)),
        Section("Tasks", charts=_task_charts(comparison), table=tasks),
        Section("Options that differ", table=options if names else (), num_texts=len(options[0])),
        Section("Runs", table=runs, num_texts=3),
    ]
    title = f"{comparison.metric} of {len(methods)} methods after {comparison.end:,} {unit}"
    return Page(title, [], sections, comparison.warnings)


def _average_charts(comparison: Comparison) -> list[Chart]:
    """Return the averages by env steps and, where they are known, by minutes."""
    title = f"{comparison.metric}, interquartile mean"
    charts = [_chart(comparison, AVERAGE, title)]
    if all(curves.minutes_SN is not None for curves in comparison.curves.values()):
        charts.append(_chart(comparison, AVERAGE, title, by_minutes=True))
    return charts


def _task_charts(comparison: Comparison) -> list[Chart]:
    return [_chart(comparison, task, task) for task in comparison.tasks]


def _chart(comparison: Comparison, task: str, title: str, by_minutes: bool = False) -> Chart:
    """Return the methods' curves, by env steps or by the mean minutes of the seeds."""
    curves = []
    for index, (label, (scores_STN, minutes_SN)) in enumerate(comparison.curves.items()):
        x_N: npt.NDArray[Any] = comparison.env_steps_N
        if by_minutes and minutes_SN is not None:
            x_N = minutes_SN.mean(0)
        name = f"{label} ({len(scores_STN)} seeds)"
        curves.append(Curve(name, x_N, comparison.bands[task][label], index))
    xlabel = MINUTES if by_minutes else comparison.step_unit
    return Chart(title, curves, is_bounded(comparison.metric), xlabel)
