"""Compare runs over seeds: ``mtrl-lightning compare runs/a runs/b``. PyTorch is not imported."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mtrl_lightning.formats import markdown
from mtrl_lightning.runs import ensure_writable

HELP = "Compare runs over seeds: tables, curves with intervals, a page."
DESCRIPTION = (
    "Compare the evaluations of runs. Runs whose options differ in the seed alone are one method."
    " Print a table, with 95 % intervals of a bootstrap over the seeds, and write a plot and a"
    " page to look at in a browser. The first method is what the others are compared with."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``compare``."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's folder, ROOT/NAME/version_N, or a folder that contains runs, ROOT/NAME or"
        " ROOT, or a copy of a run's metrics.csv; LABEL=RUN names the method of its runs",
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
        "--folder",
        type=Path,
        default=Path("comparison"),
        metavar="PATH",
        help="folder of what is written (default: comparison)",
    )
    parser.add_argument(
        "--across_protocols",
        action="store_true",
        help="compare runs of different protocols, whose numbers do not mean the same",
    )


def run(options: argparse.Namespace) -> None:
    """Compare the runs, print the tables, and write the files.

    Raises:
        ConfigurationError: if the runs cannot be compared.
        OSError: if a file cannot be written.
    """
    # they import NumPy, which the help does without
    from mtrl_lightning.reports import comparison as tables
    from mtrl_lightning.reports.comparison_report import comparison_page, plot_comparison
    from mtrl_lightning.reports.record import is_bounded
    from mtrl_lightning.reports.render import REPORT, write_page

    comparison = tables.compare_runs(options.runs, options.metric, options.across_protocols)
    threshold = options.threshold
    if threshold is None and is_bounded(comparison.metric):
        threshold = tables.THRESHOLD
    folder = options.folder
    ensure_writable(folder)
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
    plot_comparison(comparison, folder / "comparison.png")
    write_page(folder / REPORT, comparison_page(comparison, rows, threshold))
    print(f"\n{folder}: {REPORT}, comparison.png")
