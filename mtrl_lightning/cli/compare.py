"""Look at a run, or compare several over seeds: ``mtrl-lightning compare runs/a runs/b``.

PyTorch is not imported.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mtrl_lightning.runs import ensure_writable
from mtrl_lightning.utils.text import markdown

HELP = "Look at one run or compare several: tables, and a page of curves with intervals."
DESCRIPTION = (
    "Show the evaluations of one run or of several. Runs whose options differ only in the seed are"
    " one method. Print tables, with 95 % intervals of a bootstrap over the seeds, and write a page"
    " to look at in a browser. The first method is what the others are compared with."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``compare``."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's folder, ROOT/NAME/version_N, or a folder that contains runs, ROOT/NAME or"
        " ROOT; LABEL=RUN names the method of its runs",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="metric of every task, such as eval/return (default: the first of eval/success,"
        " eval/score and eval/return that all runs have)",
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="VALUE",
        help="print the steps and minutes until the mean over tasks reaches it (default: 0.8"
        " for success and score)",
    )
    parser.add_argument(
        "--page",
        type=Path,
        default=Path("comparison.html"),
        metavar="FILE",
        help="the page that is written (default: comparison.html)",
    )
    parser.add_argument(
        "--across_protocols",
        action="store_true",
        help="compare runs of different protocols, whose numbers do not mean the same",
    )


def run(options: argparse.Namespace) -> None:
    """Compare the runs, print the tables, and write the page."""
    # they import NumPy, which the help does without
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
