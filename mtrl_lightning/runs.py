"""A run's folder, ``<root>/<name>/version_N``, the checkpoints in it, and its lock."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mtrl_lightning.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "run.lock"


def versions(root: str, name: str) -> list[Path]:
    """Return the folders of the runs of this name, oldest first."""
    found = [
        path
        for path in (Path(root) / name).glob("version_*")
        if path.name.removeprefix("version_").isdigit()
    ]
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
                f"there is no checkpoint {which}: give a file in a run's checkpoints folder, last,"
                " or best"
            )
        return Path(which)
    for folder in reversed(versions(root, name)):
        path = folder / "checkpoints" / f"{which}.ckpt"
        if path.is_file() or (which == "last" and any(path.parent.glob("step_*.ckpt"))):
            return path
    raise ConfigurationError(
        f"no run in {Path(root) / name} has a {which}.ckpt: give --name and --root of the run, or a"
        " path"
    )


def run_folder_of(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote a checkpoint.

    Raises:
        ConfigurationError: if the checkpoint does not lie in a run's ``checkpoints`` folder.
    """
    folder = checkpoint.resolve().parent
    if folder.name != "checkpoints":
        raise ConfigurationError(
            f"{checkpoint} does not lie in a run's checkpoints folder, so its run cannot be"
            " continued"
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
        raise ConfigurationError(
            f"the run's folder {folder} cannot be written ({error}): free or mend it"
        ) from error


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from training in a run's folder; the kernel frees the lock of a process that was killed.

    Without effect where the system or the file system has no such locks.

    Raises:
        ConfigurationError: if another process holds it.
    """
    path = folder / LOCK
    descriptor = _lock(path, os.O_CREAT)
    try:
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"pid {os.getpid()} on host {socket.gethostname()}".encode())
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)  # before it is freed: afterwards it may be another's
            os.close(descriptor)


def check_idle(folder: Path) -> None:
    """Check that nobody holds the lock of a run's folder, and write nothing.

    Raises:
        ConfigurationError: if another process holds it.
    """
    descriptor = _lock(folder / LOCK, 0)
    if descriptor is not None:
        os.close(descriptor)


def _lock(path: Path, flags: int) -> int | None:
    while fcntl is not None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.lstat()):
                return descriptor
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace") or "just started"
            os.close(descriptor)
            raise ConfigurationError(
                f"another process ({holder}) is training in {path.parent}: wait until it has ended;"
                " if there is no"
                f" such process any more because its host failed, delete {path}"
            ) from None
        except FileNotFoundError:  # its holder has ended and deleted it
            pass
        except OSError:
            os.close(descriptor)
            return None
        os.close(descriptor)
    return None
