"""The page of a comparison, one file of HTML: tables, and curves that fit a phone's width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy.typing as npt

from mtrl_lightning.compare.charts import MINUTES, Chart, Curve, line_style, png_uri
from mtrl_lightning.compare.comparison import AVERAGE, Comparison, table, task_table
from mtrl_lightning.compare.methods import option_table
from mtrl_lightning.compare.record import is_bounded
from mtrl_lightning.runs import replacing

EXPLANATION = (
    "At the end and over training: interquartile mean over seeds and tasks, with its 95 %"
    " interval of a bootstrap that resamples the seeds of each task. P(better than the first): the"
    " probability that a run has a higher score at the end than one of the first method on the"
    " same task. Steps and minutes to the threshold: median of the seeds whose mean over tasks"
    " reached it."
)
STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 12px; font: 14px/1.5 system-ui, sans-serif;
  overflow-wrap: anywhere; }
img { width: 374px; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { min-width: 5em; padding: 3px 12px 3px 0; text-align: left;
  border-bottom: 1px solid #d9dee5; }
.warning { padding: 8px 12px; background: #fff2d6; }
.legend { margin-right: 16px; }
@media (max-width: 600px) {  /* a row becomes a block of lines, each with its column's name */
  th { display: none; }
  tr { display: block; padding: 8px 0; border-bottom: 1px solid #d9dee5; }
  td { display: flex; justify-content: space-between; gap: 16px; padding: 0; border: 0;
    text-align: right; }
  td::before { content: attr(data-column); color: #5c6673; }
}
"""
DASHES = {"-": "none", "--": "6 3", ":": "2 2"}
"""Line styles of Matplotlib in SVG."""


def write_page(
    path: Path, comparison: Comparison, rows: Sequence[Mapping[str, Any]], threshold: float | None
) -> None:
    """Write the page of a comparison.

    Args:
        path: of the page.
        comparison: the methods and their curves.
        rows: returned by ``summarize``.
        threshold: with which it was called.
    """
    methods = comparison.methods
    unit = comparison.step_unit
    title = f"{comparison.metric} after {comparison.end:,} {unit}"
    warnings = [f'<p class="warning">{escape(text)}</p>' for text in comparison.warnings]
    options = option_table(methods)
    runs = [["method", "seed", "run", unit]]
    runs += [
        [method.label, str(run.seed), str(run.folder), f"{run.env_steps:,}"]
        for method in methods
        for run in method.runs
    ]
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}'
        '</title>\n<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"\n<style>{STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(title)}</h1>",
        *warnings,
        "<h2>Methods</h2>",
        _table(table(rows, threshold, unit)),
        f"<p>{EXPLANATION}</p>",
        "<h2>Average over tasks</h2>",
        _legend(comparison),
        *map(_image, average_charts(comparison)),
        "<h2>Tasks</h2>",
        _table(task_table(comparison)),
        _legend(comparison),
        *map(_image, task_charts(comparison)),
        *(["<h2>Options that differ</h2>", _table(options)] if len(options) > 1 else []),
        "<h2>Runs</h2>",
        _table(runs),
        "</body>\n</html>\n",
    ]
    with replacing(path) as unfinished:
        unfinished.write_text("\n".join(parts), encoding="utf-8")


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML; the first line is the header."""
    header, *others = [[escape(cell) for cell in line] for line in lines]
    html = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in header) + "</tr>"]
    for line in others:
        cells = zip(header, line, strict=True)
        html.append(
            "<tr>" + "".join(f'<td data-column="{name}">{c}</td>' for name, c in cells) + "</tr>"
        )
    return "\n".join(["<table>", *html, "</table>"])


def _legend(comparison: Comparison) -> str:
    """Return the color and line of each method."""
    from matplotlib.colors import to_hex

    html = []
    for index, label in enumerate(comparison.curves):
        style = line_style(index)
        line = (
            '<svg width="28" height="8"><line x2="28" y1="4" y2="4" stroke-width="2"'
            f' stroke="{to_hex(style["color"])}" stroke-dasharray="{DASHES[style["linestyle"]]}"/>'
            "</svg>"
        )
        html.append(f'<span class="legend">{line} {escape(label)}</span>')
    return "<p>" + "\n".join(html) + "</p>"


def _image(chart: Chart) -> str:
    return f'<img alt="{escape(chart.title)}" src="{png_uri(chart)}">'


def average_charts(comparison: Comparison) -> list[Chart]:
    """Return the averages by env steps and, where they are known, by minutes."""
    title = f"{comparison.metric}, interquartile mean"
    charts = [_chart(comparison, AVERAGE, title)]
    if all(curves.minutes_SN is not None for curves in comparison.curves.values()):
        charts.append(_chart(comparison, AVERAGE, title, by_minutes=True))
    return charts


def task_charts(comparison: Comparison) -> list[Chart]:
    """Return a chart of each task."""
    return [_chart(comparison, task, task) for task in comparison.tasks]


def _chart(comparison: Comparison, task: str, title: str, by_minutes: bool = False) -> Chart:
    """Return the methods' curves, by env steps or by the mean minutes of the seeds."""
    curves = []
    for index, (label, (_, minutes_SN)) in enumerate(comparison.curves.items()):
        x_N: npt.NDArray[Any] = comparison.env_steps_N
        if by_minutes and minutes_SN is not None:
            x_N = minutes_SN.mean(0)
        curves.append(Curve(label, x_N, comparison.bands[task][label], index))
    xlabel = MINUTES if by_minutes else comparison.step_unit
    return Chart(title, curves, is_bounded(comparison.metric), xlabel)
