"""Delete runs: ``mtrl-lightning clear runs/try/version_0``. PyTorch is not imported."""

from __future__ import annotations

import argparse
import re
import shutil
import stat
import sys
from pathlib import Path

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import check_idle, run_lock

HELP = "Delete runs, or their replays alone: list what goes, and ask."
DESCRIPTION = (
    "Delete the folders of runs, with everything in them. What goes is listed with its size, and"
    " nothing is deleted without a yes. Links are not followed, and a run in training is refused."
)
SIGNS_OF_A_RUN = ("config.yaml", "metrics.csv", "checkpoints")
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``clear``."""
    run_help = "a run's folder, ROOT/NAME/version_N"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=run_help)
    replay_help = "delete the replays alone; weights, checkpoints and metrics are kept"
    parser.add_argument("--replay_only", action="store_true", help=replay_help)
    parser.add_argument("--yes", action="store_true", help="delete without asking")


def run(options: argparse.Namespace) -> None:
    """List the files of runs, and delete them if that is wanted.

    Raises:
        ConfigurationError: if a path is not the folder of a run, or the run is in training.
        OSError: if a file cannot be read or deleted.
    """
    folders = [_run_folder(path) for path in options.runs]
    for folder in folders:
        check_idle(folder)
        print(f"{folder}:")
        for path in sorted(folder.iterdir()):
            if options.replay_only and path.name != "replay":
                continue
            print(f"{_size(path) / MIB:10.1f} MiB  {path.name}{'/' if path.is_dir() else ''}")
    if not options.yes:
        print("Delete this? [y/N] ", end="", flush=True)
        answer = sys.stdin.readline() if sys.stdin.isatty() else ""
        if answer.strip().lower() not in ("y", "yes"):
            print("\nNothing was deleted: answer y, or add --yes")
            return
    for folder in folders:
        path = folder / "replay" if options.replay_only else folder
        with run_lock(folder):
            if path.exists():
                shutil.rmtree(path)
        print(f"Deleted: {path}")
    if options.replay_only:
        print("To continue from a checkpoint with an empty replay: --replay.restore false")


def _run_folder(path: Path) -> Path:
    folder = path.resolve()
    signs = [sign for sign in SIGNS_OF_A_RUN if (folder / sign).exists()]
    if len(signs) > 1 or (signs and re.fullmatch(r"version_\d+", folder.name)):
        return folder
    raise ConfigurationError(
        f"{path} is not the folder of a run, which has {', '.join(SIGNS_OF_A_RUN)}: give one,"
        " such as runs/NAME/version_0"
    )


def _size(path: Path) -> int:
    """Return the bytes of a file or of a folder's files, of which hard links count once."""
    found = [path.lstat(), *([] if path.is_symlink() else map(Path.lstat, path.rglob("*")))]
    files = [one for one in found if not stat.S_ISDIR(one.st_mode)]
    return sum({(one.st_dev, one.st_ino): one.st_size for one in files}.values())
