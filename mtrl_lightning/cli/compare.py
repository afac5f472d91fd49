"""Show the results of a run, or compare several: ``mtrl-lightning compare runs/a runs/b``.

PyTorch is not imported.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mtrl_lightning.runs import ensure_writable
from mtrl_lightning.utils.text import markdown

HELP = "Show the results of a run or compare several: tables, and learning curves as a web page."
DESCRIPTION = (
    "Show the evaluations of one or several runs. Runs whose options differ only in the seed form"
    " one method. Print tables with 95 % bootstrap intervals over seeds, and write a page to open"
    " in a browser. The other methods are compared with the first."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``compare``."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folder, ROOT/NAME/version_N, or a folder that contains runs, ROOT/NAME or ROOT;"
        " LABEL=RUN sets the name of their method",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="metric with values per task, such as eval/return (default: the first of"
        " eval/success, eval/score and eval/return that all runs have)",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="VALUE",
        help="print the steps and minutes until the mean over tasks reaches this value (default:"
        " 0.8 for success and score)",
    )
    parser.add_argument(
        "--page",
        type=Path,
        default=Path("comparison.html"),
        metavar="FILE",
        help="output page (default: comparison.html)",
    )
    parser.add_argument(
        "--across_protocols",
        action="store_true",
        help="compare runs even if their protocols differ and their numbers are not comparable",
    )


def run(options: argparse.Namespace) -> None:
    """Compare the runs, print the tables, and write the page."""
    # imported lazily: they import NumPy, which the help does not need
    from mtrl_lightning.compare import comparison as tables
    from mtrl_lightning.compare.methods import option_table
    from mtrl_lightning.compare.page import write_page
    from mtrl_lightning.compare.record import is_bounded

    comparison = tables.compare_runs(options.runs, options.metric, options.across_protocols)
    threshold = options.threshold
    if threshold is None and is_bounded(comparison.metric):
        threshold = tables.THRESHOLD
    ensure_writable(options.page.parent)
    for warning in comparison.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    rows = tables.summarize(comparison, threshold)
    unit = comparison.step_unit
    print(
        f"{comparison.metric} of {len(comparison.tasks)} tasks after {comparison.end:,} {unit}:"
        " interquartile mean over seeds and tasks [95 % bootstrap interval]\n"
    )
    print(markdown(tables.table(rows, threshold, unit)))
    print("\nInterquartile mean over seeds of each task\n")
    print(markdown(tables.task_table(comparison)))
    differing = option_table(comparison.methods)
    if len(differing) > 1:
        print(f"\nOptions that differ\n\n{markdown(differing)}")
    write_page(options.page, comparison, rows, threshold)
    print(f"\nCurves and tables: {options.page}")
