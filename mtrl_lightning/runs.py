"""Run folders, ``<root>/<name>/version_N``, with their checkpoints and locks.

PyTorch is not imported.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from mtrl_lightning.errors import ConfigurationError, name_hint

POLICIES = Path(__file__).parent / "policies"
"""The trained policies of this package, one folder each."""
LOCK = "run.lock"
VALIDATIONS = "validations.jsonl"
"""The results of ``validate`` and ``test``, one line of JSON each."""
STARTED = ("checkpoints", "metrics.jsonl", "replay")
"""Files that identify the folder of a run that has started."""
RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID")
"""Environment variables in which launchers pass the rank of a process."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which atomically replaces ``path`` when it is complete.

    Args:
        path: the file to replace; it need not exist.
    """
    unfinished = path.with_name(f"{path.stem}.unfinished{path.suffix}")
    yield unfinished
    unfinished.replace(path)


def is_first_process() -> bool:
    """Return whether this is the first process of a run, or its only one."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)


@contextlib.contextmanager
def open_run(root: str, name: str, version: str | None, checkpoint: Path | None) -> Iterator[Path]:
    """Yield the run folder, locked in this context.

    Only the first process creates and locks it; the others get it from ``Trainer.log_dir``. The
    folder of a new run that fails before it has started is deleted.

    Args:
        root: folder of all runs.
        name: name of the run.
        version: name of the folder in ``ROOT/NAME``; None for a new ``version_N``.
        checkpoint: checkpoint in its folder from which the run resumes; None for a new run.
    """
    parent = Path(root, name).resolve()
    folder = parent if checkpoint is None else run_folder_of(checkpoint)
    if not is_first_process():
        yield folder
        return
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    if checkpoint is None:
        folder = _new_folder(parent) if version is None else parent / version
    ensure_writable(folder)
    with run_lock(folder):  # first, so that another process' folder is never deleted
        try:
            yield folder
        except BaseException:
            if not any((folder / sign).exists() for sign in STARTED):
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):  # stops at the first that has other contents
                    for path in missing:
                        path.rmdir()
            raise


def _new_folder(parent: Path) -> Path:
    """Create the folder of a new run; runs started simultaneously get different folders."""
    used = [path.name.removeprefix("version_") for path in parent.glob("version_*")]
    number = max([int(number) for number in used if number.isdigit()], default=-1)
    while True:
        number += 1
        folder = parent / f"version_{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if not parent.is_dir():
                raise ConfigurationError(f"{parent} is a file: choose another name") from None
        except OSError as error:
            raise ConfigurationError(
                f"the run folder {folder} cannot be created ({error}): choose another --root"
            ) from error


def find_run(run: str | Path) -> Path:
    """Return a run folder.

    Args:
        run: the run folder; one of its checkpoints; or a run's name, or its folder ``ROOT/NAME``,
            for the most recently trained version that has a checkpoint.
    """
    path = Path(run)
    if path.is_file():
        return run_folder_of(path)
    if _has_checkpoint(path):
        return path
    for parent in (path, Path("runs") / path):
        versions = [folder for folder in parent.glob("version_*") if _has_checkpoint(folder)]
        if versions:
            return max(versions, key=lambda folder: (folder / "checkpoints").stat().st_mtime_ns)
    if str(run) in policies():
        raise ConfigurationError(
            f"{run} is a policy of this package, without training state: start a new run from it"
            f" with --init_from {run}"
        )
    raise ConfigurationError(
        f"there is no checkpoint of a run {run}: give a run folder, runs/NAME/version_N, one of its"
        " checkpoints, or its name"
    )


def _has_checkpoint(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("*.ckpt"))


def newest_checkpoint(folder: Path) -> Path:
    """Return the newest checkpoint of a run with valid checksums."""
    last = folder / "checkpoints" / "last.ckpt"
    others = sorted(
        folder.glob("checkpoints/env_steps=*.ckpt"),
        key=lambda path: path.stat().st_mtime_ns,
        reverse=True,
    )
    for path in (last, *others):
        if not is_whole(path):
            continue
        if path != last:
            warnings.warn(
                f"{last} is damaged or missing: using the newest complete checkpoint, {path}",
                stacklevel=2,
            )
        return path
    raise ConfigurationError(f"{folder} has no complete checkpoint: give another run")


def is_whole(checkpoint: str | Path) -> bool:
    """Return whether a checkpoint is complete and its checksums are valid."""
    try:
        with zipfile.ZipFile(checkpoint) as archive:
            return archive.testzip() is None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return False


def checkpoint_at(run: str | Path) -> Path:
    """Return the given checkpoint, or the newest complete one of a run; see ``find_run``."""
    return Path(run) if Path(run).is_file() else newest_checkpoint(find_run(run))


def best_checkpoint(which: str | Path) -> Path:
    """Return the checkpoint of a trained policy.

    Args:
        which: a checkpoint; or a run, as for ``find_run``, or the name of a policy of this
            package, for its best checkpoint, or the newest one if there is no best.
    """
    if Path(which).is_file():
        return Path(which)
    # a folder with the name of a policy takes precedence
    folder = None if Path(which, "checkpoints").is_dir() else policies().get(str(which))
    if folder is None:
        try:
            folder = find_run(which)
        except ConfigurationError as error:
            hint = name_hint(str(which), policies())
            raise ConfigurationError(f"{error}, or a policy of this package: {hint}") from None
    best = folder / "checkpoints" / "best.ckpt"
    return best if best.is_file() else newest_checkpoint(folder)


def is_of_package(path: Path) -> bool:
    """Return whether a file or a folder belongs to a policy of this package."""
    return path.resolve().is_relative_to(POLICIES.resolve())


def output_folder(run_folder: Path, *names: str) -> Path:
    """Return the output folder for files derived from a policy.

    Args:
        run_folder: folder of the policy's run.
        names: path components in the run folder. For a policy of this package, the folder is the
            first component in the working directory, followed by the policy's name.
    """
    if is_of_package(run_folder):
        return Path(names[0]) / run_folder.name
    return run_folder.joinpath(*names)


def policies() -> dict[str, Path]:
    """Return the folders of the policies of this package by name."""
    folders = sorted(path.parent.parent for path in POLICIES.glob("*/checkpoints/best.ckpt"))
    return {folder.name: folder for folder in folders}


def config_file_of(folder: Path) -> Path:
    """Return the configuration with which a run was started or last resumed."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigurationError(
            f"{folder} has no config.yaml: use runs that were started from Python from Python, with"
            " train(..., ckpt_path=...), load_policy, evaluate, record_videos, export_policy"
        )
    return path


def read_config(path: Path) -> dict[str, Any]:
    """Read a YAML file written by a run, such as ``config.yaml``, as plain values."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times faster
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, yaml.YAMLError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{path} cannot be read: {reason}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} is not a mapping of options")
    return content


def run_folder_of(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote a checkpoint."""
    folder = checkpoint.resolve().parent  # it may be a link to another checkpoint of the run
    if folder.name != "checkpoints":
        raise ConfigurationError(
            f"{checkpoint} is not in the checkpoints folder of a run:"
            " give a path such as runs/NAME/version_0/checkpoints/last.ckpt"
        )
    return folder.parent


def ensure_writable(folder: Path) -> None:
    """Create a folder if it does not exist, and check that files can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"the folder {folder} is not writable ({error}): check its permissions and the free"
            " disk space"
        ) from error


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Lock a run folder, so that no other process trains in it.

    The lock of a process that was killed is released, but the file remains.
    """
    path = folder / LOCK
    try:
        lock = FileLock(path).acquire(blocking=False)
    except Timeout:
        raise ConfigurationError(
            f"another process is training in {folder}: wait until it has finished. If its host"
            f" failed and the process no longer exists, delete {path}"
        ) from None
    with lock:
        yield


def check_idle(folder: Path) -> None:
    """Check that no process is training in a run folder."""
    if (folder / LOCK).exists():
        with run_lock(folder):
            pass
