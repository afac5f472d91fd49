"""Read a checkpoint file, and report errors of damaged ones in one sentence."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError

FORMAT = 4
"""Version of the checkpoint's format."""
SECTIONS = ("callbacks", "loops", "lr_schedulers", "optimizer_states", "state_dict")
"""The sections of a checkpoint that Lightning reads."""
DAMAGED = (
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""Exceptions that damaged files, and those of other versions, cause while they are restored."""
OTHER_CAUSES = (
    ConfigurationError,
    EnvironmentFaultError,
    torch.OutOfMemoryError,
)
"""Exceptions of these classes that have another cause."""


@contextmanager
def restoring(path: str | Path | None) -> Iterator[None]:
    """Turn errors of values that cannot be restored into one that names the checkpoint.

    Args:
        path: the checkpoint; None where there is none to restore.

    Raises:
        ConfigurationError: if the checkpoint is damaged or from another version.
    """
    try:
        yield
    except OTHER_CAUSES:
        raise
    except DAMAGED as error:
        if path is None:
            raise
        first_line = (str(error).splitlines() or [""])[0]
        raise ConfigurationError(
            f"the checkpoint {path} is damaged or from another version"
            f" ({type(error).__name__}: {first_line[:200]}): use another one"
        ) from error


def load_checkpoint(path: str | Path, verify: bool = True, mmap: bool = True) -> dict[str, Any]:
    """Read a checkpoint's tensors and plain values; nothing in it is executed.

    Args:
        path: the file.
        verify: whether the checksums in the file are compared, for which all of it is read.
        mmap: whether tensors stay on disk until they are used.

    Raises:
        ConfigurationError: if the file is missing, damaged, not a checkpoint of this package, or
            from another version.
    """
    if not Path(path).is_file():
        raise ConfigurationError(
            f"there is no checkpoint {path}: give a file in a run's checkpoints/ folder"
        )
    with restoring(path):
        if verify:
            _check_sums(path)
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    state = loaded.get("mtrl_lightning") if isinstance(loaded, dict) else None
    if not isinstance(state, dict) or "format" not in state:
        raise ConfigurationError(
            f"{path} was not written by mtrl_lightning: give one of a run's checkpoints"
        )
    if state["format"] != FORMAT:
        raise ConfigurationError(
            f"the checkpoint {path} has format {state['format']}, this version reads {FORMAT}:"
            " use the version that wrote it"
        )
    return loaded


def _check_sums(path: str | Path) -> None:
    """Compare the checksums of a file's members, which ``torch.load`` does not.

    Raises:
        BadZipFile: if one differs, or the file is incomplete.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"wrong checksum of {damaged}")


def env_steps_of(checkpoint: dict[str, Any]) -> int:
    """Return the environment steps that a loaded checkpoint's run had made."""
    env_steps: int = checkpoint["mtrl_lightning"]["counters"]["env_steps"]
    return env_steps


def check_complete(checkpoint: dict[str, Any]) -> None:
    """Check that a run can continue from a checkpoint, and not only its policy be loaded.

    Raises:
        ConfigurationError: if a section is missing.
    """
    missing = [name for name in SECTIONS if name not in checkpoint]
    if missing:
        raise ConfigurationError(
            f"the checkpoint has no {', '.join(missing)}: no run can continue from it; give one of"
            " a run's checkpoints/ folder, or start a new run from its policy by --init_from"
        )
