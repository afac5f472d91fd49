"""A run's folder, ``<root>/<name>/version_N``, and the checkpoints in it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mtrl_lightning.errors import ConfigurationError


def versions(root: str, name: str) -> list[Path]:
    """Return the folders of the runs of this name, oldest first."""
    found = [path for path in (Path(root) / name).glob("version_*") if path.name.removeprefix("version_").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("version_")))


def new_run_folder(root: str, name: str) -> Path:
    """Make the folder of a new run; runs that start at the same time get different ones.

    Raises:
        ConfigurationError: if it cannot be made.
    """
    while True:
        before = versions(root, name)
        number = int(before[-1].name.removeprefix("version_")) + 1 if before else 0
        folder = Path(root) / name / f"version_{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if not folder.is_dir():
                raise ConfigurationError(
                    f"{folder} is in the way of the run's folder: choose another --root"
                ) from error
        except OSError as error:
            raise ConfigurationError(
                f"the run's folder {folder} cannot be made ({error}): choose another --root"
            ) from error


def find_checkpoint(which: str, root: str, name: str) -> Path:
    """Return the checkpoint's path for a path, or for ``last`` or ``best`` of the newest run that has one.

    Raises:
        ConfigurationError: if there is none.
    """
    if which not in ("last", "best"):
        if not Path(which).is_file():
            raise ConfigurationError(
                f"there is no checkpoint {which}: give a file in a run's checkpoints folder, last, or best"
            )
        return Path(which)
    for folder in reversed(versions(root, name)):
        path = folder / "checkpoints" / f"{which}.ckpt"
        if path.is_file():
            return path
    raise ConfigurationError(
        f"no run in {Path(root) / name} has a {which}.ckpt: give --name and --root of the run, or a path"
    )


def run_folder_of(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote a checkpoint.

    Raises:
        ConfigurationError: if the checkpoint does not lie in a run's ``checkpoints`` folder.
    """
    folder = checkpoint.resolve().parent
    if folder.name != "checkpoints":
        raise ConfigurationError(
            f"{checkpoint} does not lie in a run's checkpoints folder, so its run cannot be continued"
        )
    return folder.parent


def ensure_writable(folder: Path) -> None:
    """Make a folder if it is not there, and try to write into it.

    Raises:
        ConfigurationError: if it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(f"the run's folder {folder} cannot be written ({error}): free or mend it") from error
