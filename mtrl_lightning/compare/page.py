"""The comparison as one HTML page with tables and curves."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mtrl_lightning.compare.charts import Chart, Curve, png
from mtrl_lightning.compare.comparison import AVERAGE, Comparison, table, task_table
from mtrl_lightning.compare.methods import option_table
from mtrl_lightning.compare.record import is_bounded
from mtrl_lightning.runs import replacing

EXPLANATION = (
    "At the end and over training: interquartile mean over seeds and tasks, with a 95 % bootstrap"
    " interval that resamples the seeds of each task. P(better than the first): the probability"
    " that a run has a higher final score than a run of the first method on the same task. Steps"
    " and minutes to the threshold: median over the seeds whose mean over tasks reached it."
)
HEAD = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { margin: 0 auto; max-width: 1300px; padding: 12px; font: 14px/1.5 system-ui, sans-serif; }
img { max-width: 100%; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px 3px 0; text-align: left; border-bottom: 1px solid #d9dee5; }
.warning { padding: 8px 12px; background: #fff2d6; }
</style>
"""


def write_page(
    path: Path, comparison: Comparison, rows: Sequence[Mapping[str, Any]], threshold: float | None
) -> None:
    """Write the page of a comparison.

    Args:
        path: path of the page.
        comparison: the methods and their curves.
        rows: rows returned by ``summarize``.
        threshold: threshold passed to ``summarize``.
    """
    unit = comparison.step_unit
    title = escape(f"{comparison.metric} after {comparison.end:,} {unit}")
    options = option_table(comparison.methods)
    runs = [["method", "seed", "run", unit]]
    runs += [
        [method.label, str(run.seed), str(run.folder), f"{run.env_steps:,}"]
        for method in comparison.methods
        for run in method.runs
    ]
    parts = [
        f"{HEAD}<title>{title}</title>\n<h1>{title}</h1>",
        *(f'<p class="warning">{escape(text)}</p>' for text in comparison.warnings),
        _table(table(rows, threshold, unit)),
        f"<p>{EXPLANATION}</p>",
        _image(average_charts(comparison)),
        "<h2>Tasks</h2>",
        _table(task_table(comparison)),
        _image([_chart(comparison, task, task) for task in comparison.tasks]),
        *(["<h2>Options that differ</h2>", _table(options)] if len(options) > 1 else []),
        "<h2>Runs</h2>",
        _table(runs),
        "</html>\n",
    ]
    with replacing(path) as unfinished:
        unfinished.write_text("\n".join(parts), encoding="utf-8")


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML; the first line is the header."""
    html = ["<div><table>"]
    for index, line in enumerate(lines):
        tag = "td" if index else "th"
        html.append(f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in line)}</tr>")
    return "\n".join([*html, "</table></div>"])


def _image(charts: Sequence[Chart]) -> str:
    return (
        f'<img alt="curves" src="data:image/png;base64,{base64.b64encode(png(charts)).decode()}">'
    )


def average_charts(comparison: Comparison) -> list[Chart]:
    """Return the averages over environment steps and, if known, over minutes."""
    title = f"{comparison.metric}, interquartile mean"
    charts = [_chart(comparison, AVERAGE, title)]
    if all(curves.minutes_SN is not None for curves in comparison.curves.values()):
        charts.append(_chart(comparison, AVERAGE, title, by_minutes=True))
    return charts


def _chart(comparison: Comparison, task: str, title: str, by_minutes: bool = False) -> Chart:
    """Return the methods' curves over environment steps, or over the seeds' mean minutes."""
    curves = [
        Curve(
            label,
            minutes_SN.mean(0) if by_minutes and minutes_SN is not None else comparison.env_steps_N,
            comparison.bands[task][label],
            index,
        )
        for index, (label, (_, minutes_SN)) in enumerate(comparison.curves.items())
    ]
    xlabel = "minutes of training" if by_minutes else comparison.step_unit
    return Chart(title, curves, is_bounded(comparison.metric), xlabel)
