"""Delete runs: ``mtrl-lightning clear runs/try/version_0``. PyTorch is not imported."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import check_idle, run_lock

HELP = "Delete run folders after listing their contents and asking for confirmation."
DESCRIPTION = f"{HELP} Links are not followed, and runs in training cannot be deleted."
SIGNS_OF_A_RUN = ("config.yaml", "metrics.jsonl", "checkpoints")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``clear``."""
    run_help = "a run's folder, ROOT/NAME/version_N"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=run_help)
    parser.add_argument("--yes", action="store_true", help="delete without asking")


def run(options: argparse.Namespace) -> None:
    """List the files of runs, and delete the runs if confirmed."""
    folders = [path.resolve() for path in options.runs]
    for folder in folders:
        is_run = any((folder / sign).exists() for sign in SIGNS_OF_A_RUN)
        if not is_run or not folder.name.startswith("version_"):
            raise ConfigurationError(
                f"{folder} is not a run folder: give one, such as runs/NAME/version_0"
            )
        check_idle(folder)
        print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    if not options.yes:
        print("Delete this? [y/N] ", end="", flush=True)
        answer = sys.stdin.readline() if sys.stdin.isatty() else ""
        if answer.strip().lower() not in ("y", "yes"):
            print("\nNothing was deleted: answer y, or add --yes")
            return
    for folder in folders:
        with run_lock(folder):
            shutil.rmtree(folder)
        print(f"Deleted: {folder}")
