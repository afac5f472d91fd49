"""Delete the files of a run: ``mtrl-lightning clear runs/try/version_0``.

Without ``--yes`` the files are only listed. Only files that the program wrote are deleted. Links
are never followed. PyTorch is not imported.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from re import fullmatch
from typing import NamedTuple

from mtrl_lightning.cli.commands import CommandParser
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import LOCK, VALIDATIONS, check_idle, run_lock

HELP = "List the files that would be deleted in a run's folder; delete them with --yes."
SIGNS_OF_A_RUN = ("config.yaml", "metrics.csv", "checkpoints")
FILES = (
    "config.yaml",
    "config_from_*.yaml",
    "hparams.yaml",
    "metrics.csv",
    "metrics.damaged.csv",
    "curves.png",
    "report.html",
    "wandb_logged_*.json",
    VALIDATIONS,
    LOCK,
)
UNFINISHED = ("*.unfinished", "*.unfinished.*")
FOLDERS = {
    "replay": ("*",),
    "videos": ("*",),
    "pictures": ("reconstruction_*.png", *UNFINISHED),
    "export": ("*",),
    "tensorboard": ("*",),
    "wandb": ("*",),
    "checkpoints": ("*.ckpt", *UNFINISHED),
}
"""Folders of the program and patterns of its files; with ``*`` all contents, also folders."""


class _Contents(NamedTuple):
    """The contents of a run's folder."""

    own: list[Path]
    """Files that the program wrote, and links in their place."""
    folders: list[Path]
    """Folders that the program created, inner ones first."""
    foreign: list[Path]
    """Everything else: it is not deleted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``clear``."""
    parser.add_argument(
        "run", nargs="?", type=Path, metavar="RUN", help="the run's folder, ROOT/NAME/version_N"
    )
    parser.add_argument("--run", dest="same_run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--replay_only",
        action="store_true",
        help="delete only the replay; weights, checkpoints and metrics are kept",
    )
    parser.add_argument(
        "--yes", action="store_true", help="delete the files instead of only listing them"
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run ``clear``; an error of the user is printed and ends with exit code 2.

    Args:
        args: arguments after ``clear``; None for those of the process.
    """
    parser = CommandParser(
        "clear",
        description="List, with sizes, the files that would be deleted in a run's folder; delete"
        " them with --yes. Files that the program did not write are kept, links are never followed,"
        " and a run in training is refused.",
    )
    add_arguments(parser)
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    run = options.run or options.same_run
    if run is None or (options.run and options.same_run):
        parser.error("give one run: clear runs/NAME/version_0")
    try:
        clear(run, replay_only=options.replay_only, yes=options.yes)
    except (ConfigurationError, OSError) as error:
        has_remedy = isinstance(error, ConfigurationError)
        remedy = "" if has_remedy else ": correct this and run clear again"
        print(f"\nerror: {error}{remedy}", file=sys.stderr)
        sys.exit(2)


def clear(path: Path, replay_only: bool = False, yes: bool = False) -> None:
    """List the files that would be deleted in a run's folder; delete them if ``yes``.

    Args:
        path: folder of the run.
        replay_only: delete only the replay.
        yes: delete, instead of only listing.

    Raises:
        ConfigurationError: if ``path`` is not the folder of a run, or the run is in training.
        OSError: if a file cannot be read or deleted.
    """
    folder = _run_folder(path)
    check_idle(folder)
    found = _contents(folder, replay_only)
    print(f"{folder}:")
    for file in found.own:
        print(f"{_text(file.lstat().st_size):>12}  {file.relative_to(folder)}")
    for other in found.foreign:
        reason = "(not written by the program, or a link)"
        print(f"{'kept':>12}  {other.relative_to(folder)} {reason}")
    summary = f"{len(found.own)} files, {_text(_size(found.own))}"
    if yes:
        _delete(folder, found)
    print(f"Deleted: {summary}" if yes else f"To delete: {summary}")
    if replay_only:
        print(
            "The checkpoints are kept. To continue from one of them with an empty replay:"
            " --replay.restore false"
        )
    if not yes:
        print("Nothing was deleted: add --yes to delete")


def _contents(folder: Path, replay_only: bool = False) -> _Contents:
    """Return the contents of a run's folder, or only of its replay."""
    found = _Contents([], [], [])
    names = ["replay"] if replay_only else list(FOLDERS)
    ours = [
        folder / name
        for name in names
        if (folder / name).is_dir() and not (folder / name).is_symlink()
    ]
    for own in ours:
        _collect(own, FOLDERS[own.name], found)
    if not replay_only:
        for path in sorted(set(folder.iterdir()) - set(ours)):
            _sort_in(path, (*FILES, *UNFINISHED), found)
    elif (folder / "replay").is_symlink():
        found.foreign.append(folder / "replay")
    return found


def _collect(folder: Path, patterns: tuple[str, ...], found: _Contents) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and "*" in patterns:
            _collect(path, patterns, found)
        else:
            _sort_in(path, patterns, found)
    found.folders.append(folder)


def _sort_in(path: Path, patterns: tuple[str, ...], found: _Contents) -> None:
    is_file = path.is_symlink() or path.is_file()
    if is_file and any(fnmatch(path.name, pattern) for pattern in patterns):
        found.own.append(path)
    else:
        found.foreign.append(path)


def _run_folder(path: Path) -> Path:
    folder = path.resolve()
    signs = [sign for sign in SIGNS_OF_A_RUN if (folder / sign).exists()]
    if len(signs) > 1 or (signs and fullmatch(r"version_\d+", folder.name)):
        return folder
    runs = sorted(run for pattern in ("version_*", "*/version_*") for run in folder.glob(pattern))
    if runs:
        raise ConfigurationError(
            f"{path} contains runs but is not the folder of one run:"
            f" give one of them, such as {runs[-1]}"
        )
    raise ConfigurationError(
        f"{path} is not the folder of a run, which has {', '.join(SIGNS_OF_A_RUN)}: give one,"
        " such as runs/NAME/version_0"
    )


def _delete(folder: Path, found: _Contents) -> None:
    with run_lock(folder):
        for path in found.own:
            if path != folder / LOCK:  # deleted when the lock is released
                path.unlink(missing_ok=True)
    for empty in [*found.folders, folder]:
        with contextlib.suppress(OSError):  # not empty
            empty.rmdir()


def _size(files: Sequence[Path]) -> int:
    """Return the bytes of the files; hard links to one file count once."""
    stats = [file.lstat() for file in files]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


def _text(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
