"""report.html of a comparison: every method's curves, profiles, tables and options on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtrl_lightning.reports.comparison import Bands, Comparison, table, task_table
from mtrl_lightning.reports.comparison_plot import average_charts, profile_chart, task_charts
from mtrl_lightning.reports.render import Page, Section, Table

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
) -> Page:
    """Return the page of a comparison.

    Args:
        comparison: the methods and their curves.
        bands: what ``bands_of`` computed of them.
        rows: what ``summarize`` returned.
        threshold: with which it was called.
    """
    metric = comparison.metric
    meaning = f"share of runs and tasks whose {metric} at the end is above the threshold"
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
    sections = [
        Section("Average over tasks", charts=average_charts(comparison, bands)),
        Section("Methods", [EXPLANATION], table=Table(table(rows, threshold))),
        Section("Performance profile", [meaning], [profile_chart(comparison, bands)]),
        Section(
            "Tasks", charts=task_charts(comparison, bands), table=Table(task_table(comparison))
        ),
        Section("Runs", table=Table(runs, num_texts=3)),
    ]
    if names:
        differing = Table(options, num_texts=len(methods) + 1)
        sections.insert(-1, Section("Options that differ", table=differing))
    title = f"{metric} of {len(methods)} methods after {comparison.end:,} env steps"
    return Page(title, [], sections, comparison.warnings)
