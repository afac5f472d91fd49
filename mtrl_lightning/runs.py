"""The folder of a run, ``<root>/<name>/version_N``, its checkpoints and its lock."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mtrl_lightning.errors import ConfigurationError, name_hint

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

POLICIES = Path(__file__).parent / "policies"
"""The trained policies of this package: a folder each."""
LOCK = "run.lock"
VALIDATIONS = "validations.jsonl"
"""The results of ``validate``, one line of JSON each."""
LOCK_CHARACTERS = 1000
"""Characters of a lock that are read."""
FILES_BEFORE_THE_START = re.compile(r"config\.yaml|hparams\.yaml|events\.out\.tfevents\..*")
"""Names of files that a run may have written before its first environment step."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the path of a file to write, which takes the place of another when it is complete.

    Args:
        path: the other file; it need not exist.
    """
    unfinished = path.with_name(f"{path.stem}.unfinished{path.suffix}")
    yield unfinished
    unfinished.replace(path)


def check_name(name: str) -> None:
    """Check that the folder of a run's name lies in the root folder."""
    path = Path(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ConfigurationError(
            f"the run's name is {name!r}, and its folder would not lie in the root folder:"
            " give a name such as try_1, and choose the folder of all runs by --root"
        )


def versions(root: str, name: str) -> list[Path]:
    """Return the folders of the runs of this name, oldest first."""
    folders = [
        path
        for path in (Path(root) / name).glob("version_*")
        if path.name.removeprefix("version_").isdigit()
    ]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("version_")))


def new_run_folder(root: str, name: str) -> Path:
    """Create the folder of a new run; runs that start at the same time get different folders.

    Raises:
        ConfigurationError: if the folder cannot be created.
    """
    while True:
        before = versions(root, name)
        version = int(before[-1].name.removeprefix("version_")) + 1 if before else 0
        folder = Path(root) / name / f"version_{version}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if not folder.is_dir():
                raise ConfigurationError(
                    f"the run's folder {folder} cannot be created, because a file has this name:"
                    " choose another --root"
                ) from error
        except OSError as error:
            raise ConfigurationError(
                f"the run's folder {folder} cannot be created ({error}): choose another --root"
            ) from error


def missing_folders(path: Path) -> list[Path]:
    """Return those of a folder and its parents that do not exist, inner ones first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def discard_unstarted(folder: Path) -> None:
    """Delete the folder of a run that could not start.

    It stays if anything but copies of the configuration is in it.
    """
    contents = sorted(folder.rglob("*"), reverse=True)
    files = [path for path in contents if path.is_symlink() or not path.is_dir()]
    if not all(FILES_BEFORE_THE_START.fullmatch(path.name) for path in files):
        return
    with contextlib.suppress(OSError):
        for path in files:
            path.unlink()
        for path in contents:
            if path not in files:
                path.rmdir()
        folder.rmdir()


def find_checkpoint(which: str, root: str, name: str) -> Path:
    """Return the path of a checkpoint.

    Args:
        which: a checkpoint; the folder of a run, for its last one; or ``last`` or ``best`` for that
            of the newest run that has one.
        root: root folder of all runs.
        name: name of the runs.

    Raises:
        ConfigurationError: if there is no such checkpoint.
    """
    if which not in ("last", "best"):
        return checkpoint_at(Path(which))
    for folder in reversed(versions(root, name)):
        path = folder / "checkpoints" / f"{which}.ckpt"
        if path.is_file() or (which == "last" and _has_step_checkpoint(folder)):
            return path
    raise ConfigurationError(
        f"no run in {Path(root) / name} has a {which}.ckpt:"
        " give --name and --root of the run, or the path of a checkpoint"
    )


def checkpoint_at(path: Path) -> Path:
    """Return a checkpoint that is given, or the last one of the run whose folder is given.

    Raises:
        ConfigurationError: if there is none.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        if str(path) in policies():
            raise ConfigurationError(
                f"{path} is a policy of this package, without the state of its training:"
                f" start a new run from it by --init_from {path}"
            )
        raise ConfigurationError(
            f"there is no checkpoint {path}:"
            " give a file in a run's checkpoints folder, or the folder of a run;"
            " --ckpt_path also takes last and best"
        )
    last = path / "checkpoints" / "last.ckpt"
    if last.is_file() or _has_step_checkpoint(path):
        return last
    inner = [*versions(path.parent.as_posix(), path.name), *path.glob("*/version_*")]
    if inner:
        raise ConfigurationError(
            f"{path} contains runs but is not the folder of one run:"
            f" give one of them, such as {inner[-1]}"
        )
    raise ConfigurationError(
        f"{path} has no checkpoint: give the folder of a run, such as runs/NAME/version_0,"
        " that was trained until its first checkpoint"
    )


def best_checkpoint(which: str | Path) -> Path:
    """Return the checkpoint of a trained policy.

    Args:
        which: a checkpoint; or the folder of a run, or the name of a policy of this package, for
            its best checkpoint, or the last one where there is no best.

    Raises:
        ConfigurationError: if there is none.
    """
    folder = policy_folder(str(which)) or Path(which)
    if not folder.exists():
        raise ConfigurationError(
            f"there is no checkpoint {which}: give a file in a run's checkpoints folder, the"
            " folder of a run, or a policy of this package"
            f" ({name_hint(str(which), policies())})"
        )
    best = folder / "checkpoints" / "best.ckpt"
    return best if best.is_file() else checkpoint_at(folder)


def policy_folder(name: str) -> Path | None:
    """Return the folder of a policy of this package, which is laid out as a run's; else None.

    A run's folder of the same name in the working directory takes precedence.
    """
    return None if os.path.isdir(f"{name}/checkpoints") else policies().get(name)


def is_of_package(path: Path) -> bool:
    """Return whether a file or a folder belongs to a policy of this package."""
    return path.resolve().is_relative_to(POLICIES.resolve())


def output_folder(run_folder: Path, *names: str) -> Path:
    """Return the folder for files that are made of a policy.

    Args:
        run_folder: of the policy.
        names: of the folder and those in it, in the run's folder. For a policy of this package, it
            is the one of the policy's name in the first, in the present folder.
    """
    if is_of_package(run_folder):
        return Path(names[0]) / run_folder.name
    return run_folder.joinpath(*names)


def policies() -> dict[str, Path]:
    """Return the folders of the policies of this package by name."""
    folders = sorted(path.parent.parent for path in POLICIES.glob("*/checkpoints/best.ckpt"))
    return {folder.name: folder for folder in folders}


def _has_step_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("step_*.ckpt"))


def config_file_of(folder: Path) -> Path:
    """Return the configuration with which a run was started or last continued.

    Raises:
        ConfigurationError: if there is none.
    """
    paths = [folder / "config.yaml", *sorted(folder.glob("config_from_*.yaml"))]
    existing = [path for path in paths if path.is_file()]
    if not existing:
        raise ConfigurationError(
            f"{folder} has no config.yaml: a run that was started from Python is continued by"
            " train(..., ckpt_path=...), evaluated by load_policy and evaluate, and recorded by"
            " record_videos"
        )
    return max(reversed(existing), key=lambda path: path.stat().st_mtime_ns)


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file that a run has written, such as ``config.yaml``, as plain values.

    Raises:
        ConfigurationError: if the file cannot be read, or is no mapping.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast in C
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"{path} cannot be read ({reason}): it is damaged. Use the file as the run wrote it"
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"{path} is no mapping of options: use the file as the run wrote it"
        )
    return content


def run_folder_of(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote a checkpoint.

    Raises:
        ConfigurationError: if the checkpoint is not in the ``checkpoints`` folder of a run.
    """
    folder = checkpoint.resolve().parent
    if folder.name != "checkpoints":
        raise ConfigurationError(
            f"{checkpoint} is not in the checkpoints folder of a run:"
            " give a path such as runs/NAME/version_0/checkpoints/last.ckpt"
        )
    return folder.parent


def ensure_writable(folder: Path) -> None:
    """Create a folder if it does not exist, and check that files can be written to it.

    Raises:
        ConfigurationError: if no file can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"no file can be written to the folder {folder} ({error}): check its permissions"
            " and the free disk space"
        ) from error


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock the folder of a run, so that no other process trains in it.

    The kernel releases the lock of a process that was killed. There is no lock where the operating
    system or the file system does not support it.

    Raises:
        ConfigurationError: if another process holds the lock.
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
            # before the release: later it may be another process' lock
            path.unlink(missing_ok=True)
            os.close(descriptor)


def check_idle(folder: Path) -> None:
    """Check that no process holds the lock of a run's folder, without writing anything."""
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
            holder = os.read(descriptor, LOCK_CHARACTERS).decode(errors="replace") or "just started"
            os.close(descriptor)
            raise ConfigurationError(
                f"another process ({holder}) is training in {path.parent}:"
                " wait until it has ended."
                f" If its host failed and the process no longer exists, delete {path}"
            ) from None
        except FileNotFoundError:  # the holder has ended and deleted the file: retry
            pass
        except OSError:
            os.close(descriptor)
            return None
        os.close(descriptor)
    return None
