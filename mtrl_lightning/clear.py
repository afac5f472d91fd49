"""Delete a run's files: ``python cli.py clear --run runs/try/version_0`` lists them, ``--yes`` deletes them.

Only what the program itself wrote is deleted. Links are never followed. PyTorch is not imported.
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

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import LOCK, check_idle, run_lock

HELP = "clear --run PATH lists what would be deleted of a run's folder, and deletes it with --yes; see clear --help"
SIGNS_OF_A_RUN = ("config.yaml", "metrics.csv", "checkpoints")
FILES = (
    "config.yaml",
    "config_from_*.yaml",
    "hparams.yaml",
    "metrics.csv",
    "metrics.damaged.csv",
    "curves.png",
    "wandb_logged_*.json",
    LOCK,
)
UNFINISHED = ("*.unfinished", "*.unfinished.*")
FOLDERS = {
    "replay": ("*",),
    "videos": ("*",),
    "tensorboard": ("*",),
    "wandb": ("*",),
    "checkpoints": ("*.ckpt", *UNFINISHED),
}
"""The program's folders: with ``*`` all that is in them is its own, folders in them too."""


class Contents(NamedTuple):
    """What lies in a run's folder."""

    own: list[Path]
    """Files, and links in their place, that the program wrote."""
    folders: list[Path]
    """Folders that it made, inner ones first."""
    left: list[Path]
    """What is not its own."""


def main(args: Sequence[str] | None = None) -> None:
    """Run ``clear``; a user's mistake ends with its message and the exit code 2.

    Args:
        args: what follows the word ``clear``, in place of the process' command line.
    """
    parser = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name} clear",
        description="List, with sizes, what would be deleted of a run's folder; delete it with --yes."
        " Files that the program did not write are left, links are never followed, and a run that"
        " is being trained"
        " is refused.",
    )
    parser.add_argument(
        "--run",
        required=True,
        type=Path,
        metavar="PATH",
        help="the run's folder, ROOT/NAME/version_N",
    )
    parser.add_argument(
        "--replay_only",
        action="store_true",
        help="only the replay; weights, checkpoints and metrics are kept",
    )
    parser.add_argument("--yes", action="store_true", help="delete, and not only list")
    options = parser.parse_args(sys.argv[2:] if args is None else args)
    try:
        clear(options.run, replay_only=options.replay_only, yes=options.yes)
    except (ConfigurationError, OSError) as error:
        remedy = "" if isinstance(error, ConfigurationError) else ": mend that and call clear again"
        print(f"\nerror: {error}{remedy}", file=sys.stderr)
        sys.exit(2)


def clear(path: Path, replay_only: bool = False, yes: bool = False) -> None:
    """List what would be deleted of a run's folder; delete it if ``yes``.

    Raises:
        ConfigurationError: if it is no run's folder, or the run is being trained.
        OSError: if a file cannot be read or deleted.
    """
    folder = _run_folder(path)
    check_idle(folder)
    found = contents(folder, replay_only)
    print(f"{folder}:")
    for file in found.own:
        print(f"{_text(file.lstat().st_size):>12}  {file.relative_to(folder)}")
    for other in found.left:
        print(
            f"{'left':>12}  {other.relative_to(folder)} (the program did not write it, or it is a"
            " link)"
        )
    summary = f"{len(found.own)} files, {_text(_size(found.own))}"
    if yes:
        _delete(folder, found)
    print(f"Deleted: {summary}" if yes else f"To delete: {summary}")
    if replay_only:
        print(
            "The checkpoints stay; to train on from one of them with an empty replay:"
            " --replay.restore false"
        )
    if not yes:
        print("Nothing is deleted yet: add --yes")


def contents(folder: Path, replay_only: bool = False) -> Contents:
    """Return what lies in a run's folder, or of it only the replay."""
    found = Contents([], [], [])
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
        found.left.append(folder / "replay")
    return found


def _collect(folder: Path, patterns: tuple[str, ...], found: Contents) -> None:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and "*" in patterns:
            _collect(path, patterns, found)
        else:
            _sort_in(path, patterns, found)
    found.folders.append(folder)


def _sort_in(path: Path, patterns: tuple[str, ...], found: Contents) -> None:
    is_own = (path.is_symlink() or path.is_file()) and any(
        fnmatch(path.name, pattern) for pattern in patterns
    )
    (found.own if is_own else found.left).append(path)


def _run_folder(path: Path) -> Path:
    folder = path.resolve()
    signs = [sign for sign in SIGNS_OF_A_RUN if (folder / sign).exists()]
    if len(signs) > 1 or (signs and fullmatch(r"version_\d+", folder.name)):
        return folder
    runs = sorted(run for pattern in ("version_*", "*/version_*") for run in folder.glob(pattern))
    if runs:
        raise ConfigurationError(
            f"{path} holds runs and is none itself: give one of them, such as {runs[-1]}"
        )
    raise ConfigurationError(
        f"{path} is no run's folder: it has none of {', '.join(SIGNS_OF_A_RUN)}; give one such as"
        " runs/NAME/version_0"
    )


def _delete(folder: Path, found: Contents) -> None:
    with run_lock(folder):
        for path in found.own:
            if path != folder / LOCK:  # which goes when it is freed
                path.unlink(missing_ok=True)
    for empty in [*found.folders, folder]:
        with contextlib.suppress(OSError):  # not empty
            empty.rmdir()


def _size(files: Sequence[Path]) -> int:
    return sum({(s.st_dev, s.st_ino): s.st_size for s in (file.lstat() for file in files)}.values())


def _text(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
