"""Compare runs over seeds: ``mtrl-lightning compare runs/a runs/b``. PyTorch is not imported."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mtrl_lightning.cli.commands import CommandParser, mistakes_end_the_program
from mtrl_lightning.formats import markdown
from mtrl_lightning.runs import ensure_writable

HELP = "Compare runs over seeds: a table, learning curves with intervals, a page and a CSV."
DESCRIPTION = (
    "Compare the evaluations of runs. Runs whose options differ in the seed alone are one method."
    " Print a table, with 95 % intervals of a bootstrap over the seeds, and write a plot, the"
    " curves and the table as CSV, and a page to look at in a browser. The first method is what the"
    " others are compared with."
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
        help="print the env steps and minutes until the mean over tasks reaches it (default: 0.8"
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
    parser.add_argument(
        "--no_intervals",
        action="store_true",
        help="compute no intervals; without two seeds of each method there are none in any case",
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run ``compare``; a user's mistake is printed and ends it with exit code 2.

    Args:
        args: arguments after ``compare``; None for those of the process.
    """
    parser = CommandParser("compare", description=DESCRIPTION)
    add_arguments(parser)
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    with mistakes_end_the_program():
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Compare the runs, print the tables, and write the files.

    Raises:
        ConfigurationError: if the runs cannot be compared.
        OSError: if a file cannot be written.
    """
    # they import NumPy, which the help does without
    from mtrl_lightning.reports.comparison import (
        bands_of,
        compare_runs,
        curves_csv,
        default_threshold,
        rows_csv,
        summarize,
        table,
        task_table,
    )
    from mtrl_lightning.reports.comparison_plot import plot_comparison
    from mtrl_lightning.reports.comparison_report import comparison_page
    from mtrl_lightning.reports.render import REPORT, write_page

    comparison = compare_runs(
        options.runs,
        options.metric,
        across_protocols=options.across_protocols,
        intervals=not options.no_intervals,
    )
    threshold = options.threshold
    if threshold is None:
        threshold = default_threshold(comparison.metric)
    folder = options.folder
    ensure_writable(folder)
    for warning in comparison.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    rows = summarize(comparison.curves, threshold, comparison.has_intervals)
    lines = table(rows, threshold)
    bounds = " [95 % bootstrap interval]" if comparison.has_intervals else ""
    num_tasks = len(comparison.tasks)
    print(
        f"{comparison.metric} of {num_tasks} tasks after {comparison.end:,} env steps:"
        f" interquartile mean over seeds and tasks{bounds}\n"
    )
    print(markdown(lines))
    print(f"\nMean over seeds of each task{bounds}\n")
    print(markdown(task_table(comparison)))
    bands = bands_of(comparison)
    (folder / "table.csv").write_text(rows_csv(rows), encoding="utf-8", newline="")
    (folder / "curves.csv").write_text(curves_csv(comparison, bands), encoding="utf-8", newline="")
    plot_comparison(comparison, bands, folder / "comparison.png")
    write_page(folder / REPORT, comparison_page(comparison, bands, rows, threshold))
    print(f"\n{folder}: {REPORT}, comparison.png, curves.csv, table.csv")
