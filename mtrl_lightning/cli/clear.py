"""Delete the files of a run: ``mtrl-lightning clear runs/try/version_0``.

Without ``--yes`` the files are only listed. Only files that the program wrote are deleted, and
links are never followed. PyTorch is not imported.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from re import fullmatch

from mtrl_lightning.cli.commands import CommandParser, mistakes_end_the_program
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import LOCK, VALIDATIONS, check_idle, run_lock

HELP = "List the files that would be deleted in a run's folder; delete them with --yes."
SIGNS_OF_A_RUN = ("config.yaml", "metrics.csv", "checkpoints")
UNFINISHED = ("*.unfinished", "*.unfinished.*")
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
    *UNFINISHED,
)
"""Patterns of the program's files in the run's folder itself."""
FOLDERS = {
    **dict.fromkeys(("replay", "videos", "export", "tensorboard", "wandb"), ("*",)),
    "pictures": ("reconstruction_*.png", *UNFINISHED),
    "checkpoints": ("*.ckpt", *UNFINISHED),
}
"""Folders of the program and patterns of its files; with ``*`` all contents, also folders."""


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
    run_help = "the run's folder, ROOT/NAME/version_N"
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=run_help)
    parser.add_argument("--run", dest="former_run", type=Path, help=argparse.SUPPRESS)
    replay_help = "delete only the replay; weights, checkpoints and metrics are kept"
    parser.add_argument("--replay_only", action="store_true", help=replay_help)
    yes_help = "delete the files instead of only listing them"
    parser.add_argument("--yes", action="store_true", help=yes_help)
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    if (options.run is None) == (options.former_run is None):
        parser.error("give one run: clear runs/NAME/version_0")
    if options.former_run is not None:
        print(f"warning: --run is the former form: clear {options.former_run}", file=sys.stderr)
    with mistakes_end_the_program():
        clear(options.run or options.former_run, options.replay_only, options.yes)


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
    own, foreign = _contents(folder, "replay" if replay_only else "")
    files = [name for name in own if name.is_symlink() or not name.is_dir()]
    print(f"{folder}:")
    for file in files:
        print(f"{_text(file.lstat().st_size):>12}  {file.relative_to(folder)}")
    for other in foreign:
        reason = "(not written by the program, or a link)"
        print(f"{'kept':>12}  {other.relative_to(folder)} {reason}")
    # hard links to one file count once
    sizes = {(stat.st_dev, stat.st_ino): stat.st_size for stat in map(Path.lstat, files)}
    summary = f"{len(files)} files, {_text(sum(sizes.values()))}"
    if yes:
        _delete(folder, own)
    print(f"Deleted: {summary}" if yes else f"To delete: {summary}")
    if replay_only:
        print(
            "The checkpoints are kept. To continue from one of them with an empty replay:"
            " --replay.restore false"
        )
    if not yes:
        print("Nothing was deleted: add --yes to delete")


def _contents(folder: Path, part: str) -> tuple[list[Path], list[Path]]:
    """Return what the program wrote, each folder before its contents, and everything else.

    Args:
        folder: of the run.
        part: the only one of ``FOLDERS`` that is looked at; empty for all.
    """
    own: list[Path] = []
    foreign: list[Path] = []
    for parent, folders, files in os.walk(folder):
        for name in sorted([*folders, *files]):
            path = Path(parent, name)
            parts = path.relative_to(folder).parts
            if part and parts[0] != part:
                is_own = None
            elif path.is_dir() and not path.is_symlink():
                is_own = parts[0] in FOLDERS and (len(parts) == 1 or "*" in FOLDERS[parts[0]])
            else:
                patterns = FILES if len(parts) == 1 else FOLDERS[parts[0]]
                is_own = any(fnmatch(name, pattern) for pattern in patterns)
            if is_own is not None:
                (own if is_own else foreign).append(path)
            if not is_own and name in folders:
                folders.remove(name)  # it is not entered
    return own, foreign


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


def _delete(folder: Path, own: list[Path]) -> None:
    """Delete files, and then the folders that are empty, inner ones first."""
    with run_lock(folder):
        for path in own:
            is_folder = path.is_dir() and not path.is_symlink()
            if not is_folder and path != folder / LOCK:  # deleted when the lock is released
                path.unlink(missing_ok=True)
    for path in [*reversed(own), folder]:
        with contextlib.suppress(OSError):  # a file that was deleted, or a folder that is not empty
            path.rmdir()


def _text(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
