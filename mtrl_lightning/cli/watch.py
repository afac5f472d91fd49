"""Serve the page of a run while it trains: ``mtrl-lightning watch runs/NAME/version_0``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mtrl_lightning.cli.commands import CommandParser, mistakes_end_the_program
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports.record import find_runs
from mtrl_lightning.reports.server import HOST, ReportServer

HELP = "Show a run in the browser while it trains: curves, tasks, times, faults, options."
DESCRIPTION = (
    f"Serve the page of a run on this machine ({HOST}) alone. The page is made from the run's files"
    " and refreshes itself as the run writes them; no file is changed. Ctrl+C ends the server, not"
    " the run."
)
PORT = 8765
SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``watch``."""
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="the run's folder, ROOT/NAME/version_N, or ROOT/NAME for its newest run",
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"port of the server; 0 for a free one ({PORT})"
    )
    parser.add_argument(
        "--every",
        type=float,
        default=SECONDS,
        metavar="SECONDS",
        help=f"seconds after which the page looks for something new ({SECONDS:g})",
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run ``watch``; a user's mistake is printed and ends it with exit code 2.

    Args:
        args: arguments after ``watch``; None for those of the process.
    """
    parser = CommandParser("watch", description=DESCRIPTION)
    add_arguments(parser)
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    with mistakes_end_the_program():
        watch(options)


def watch(options: argparse.Namespace) -> None:
    """Serve the page until Ctrl+C.

    Raises:
        ConfigurationError: if there is no such run, or the port cannot be used.
    """
    if options.every <= 0:
        raise ConfigurationError(f"--every is {options.every:g}: give a number above 0")
    folder = max(find_runs(options.run), key=lambda path: (path / "metrics.csv").stat().st_mtime)
    with ReportServer(folder, options.port, options.every) as server:
        print(f"{folder}: {server.address} (Ctrl+C ends the server, not the run)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
