"""report.html of a comparison: every method's curves, profiles, tables and options on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtrl_lightning.reports.comparison import (
    Band,
    Bands,
    Comparison,
    Curves,
    table,
    task_table,
)
from mtrl_lightning.reports.page import (
    MINUTES,
    STEPS,
    chart,
    curve,
    html_table,
    page,
    section,
    text,
)
from mtrl_lightning.reports.record import is_bounded

EXPLANATION = (
    "At the end and over training: interquartile mean over seeds and tasks, with its 95 %"
    " interval of a bootstrap that resamples the seeds of each task. P(better than the first): the"
    " probability that a run has a higher score at the end than one of the first method on the"
    " same task. Env steps and minutes to the threshold: median of the seeds whose mean over tasks"
    " reached it."
)


def comparison_page(
    comparison: Comparison,
    bands: Bands,
    rows: Sequence[Mapping[str, Any]],
    threshold: float | None,
) -> str:
    """Return the page of a comparison.

    Args:
        comparison: the methods and their curves.
        bands: what ``bands_of`` computed of them.
        rows: what ``summarize`` returned.
        threshold: with which it was called.
    """
    metric = comparison.metric
    curves = comparison.curves
    title = f"{metric} of {len(curves)} methods after {comparison.end:,} env steps"
    has_minutes = all(one.minutes_SN is not None for one in curves.values())
    axes = [STEPS, MINUTES] if has_minutes else [STEPS]
    average = chart("average", metric, [_group(metric, curves, bands.average)], axes=axes)
    parts = [f"<h1>{text(title)}</h1>"]
    parts += [f'<div class="warning">{text(warning)}</div>' for warning in comparison.warnings]
    explanation = f'<p class="faint">{text(EXPLANATION)}</p>'
    parts += [
        section("Average over tasks", average),
        section("Methods", html_table(table(rows, threshold)), explanation),
        section("Performance profile", _profiles(comparison, bands)),
        section("Tasks", html_table(task_table(comparison)), _task_charts(comparison, bands)),
        section("Runs", _runs(comparison)),
    ]
    return page(title, parts)


def _group(metric: str, curves: Mapping[str, Curves], bands: Mapping[str, Band]) -> dict[str, Any]:
    drawn = []
    for label, band in bands.items():
        one = curves[label]
        minutes_N = None if one.minutes_SN is None else one.minutes_SN.mean(0)
        name = f"{label} ({len(one.scores_STN)} seeds)"
        drawn.append(curve(name, one.env_steps_N, band.value_N, minutes_N, band.bounds_N2))
    return {"name": metric, "curves": drawn, "bounded": is_bounded(metric)}


def _profiles(comparison: Comparison, bands: Bands) -> str:
    curves = [
        curve(label, bands.thresholds_K, band.value_N, bounds_N2=band.bounds_N2)
        for label, band in bands.profiles.items()
    ]
    group = {"name": "profile", "curves": curves, "bounded": True, "xlabel": "threshold"}
    axes = [{"name": f"threshold of {comparison.metric}", "key": "x"}]
    caption = f"share of runs and tasks whose {comparison.metric} at the end is above the threshold"
    drawn = chart("profile", "Performance profile", [group], axes=axes)
    return f'<p class="faint">{text(caption)}</p>\n{drawn}'


def _task_charts(comparison: Comparison, bands: Bands) -> str:
    charts = [
        chart(
            f"task-{place}",
            task,
            [_group(task, comparison.curves, of_methods)],
            small=True,
            legend=False,
        )
        for place, (task, of_methods) in enumerate(bands.tasks.items())
    ]
    return f'<div class="charts">{"".join(charts)}</div>'


def _runs(comparison: Comparison) -> str:
    """Return a table of the options in which methods differ, and one of their runs."""
    methods = comparison.methods
    names = list(dict.fromkeys(name for method in methods for name in method.options))
    options = [["option", *(method.label for method in methods)]]
    options += [[n, *(str(method.options.get(n, "-")) for method in methods)] for n in names]
    runs = [["method", "seed", "run", "env steps"]]
    runs += [
        [method.label, str(run.seed), str(run.folder), f"{run.env_steps:,}"]
        for method in methods
        for run in method.runs
    ]
    shown = html_table(options, num_texts=len(methods) + 1) if names else ""
    return f"{shown}\n<p></p>\n{html_table(runs, num_texts=3)}"
