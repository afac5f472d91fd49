"""Read a checkpoint file: check its checksums and its format, and execute nothing in it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from mtrl_lightning.errors import ConfigurationError

FORMAT = 3
"""Version of what a checkpoint holds."""
_READ_BY = {2: "0.1"}
"""The versions of this package that read a former format."""


def load_checkpoint(path: str | Path, verify: bool = True) -> dict[str, Any]:
    """Read a checkpoint's plain values; tensors stay on disk until they are used.

    Args:
        path: the file.
        verify: whether the checksums of its tensors are compared, for which all of it is read.

    Raises:
        ConfigurationError: if the file is missing, damaged, of another format, or holds anything
            but tensors and plain values.
    """
    if not Path(path).is_file():
        raise ConfigurationError(
            f"there is no checkpoint {path}: give a file in a run's checkpoints/ folder"
        )
    try:
        with zipfile.ZipFile(path) as archive:  # torch compares no checksum of what it maps
            damaged = archive.testzip() if verify else None
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        cause = f"{type(error).__name__}: {first_line[:100]}"
        raise ConfigurationError(
            f"the checkpoint {path} cannot be read ({cause}): it is damaged, or of something else;"
            " use another one"
        ) from error
    try:
        check_format(loaded)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return loaded


def env_steps_of(checkpoint: dict[str, Any]) -> int:
    """Return the environment steps that a loaded checkpoint's run had made."""
    return checkpoint["mtrl_lightning"]["counters"]["env_steps"]


def check_format(checkpoint: dict[str, Any]) -> None:
    """Check that a loaded checkpoint was written by this package, in the format of this version.

    Raises:
        ConfigurationError: if it was not.
    """
    own = checkpoint.get("mtrl_lightning") if isinstance(checkpoint, dict) else None
    if not isinstance(own, dict) or "format" not in own:
        raise ConfigurationError(
            "the checkpoint was not written by mtrl_lightning: give one of a run's checkpoints"
        )
    found = own["format"]
    if found == FORMAT:
        return
    if isinstance(found, int) and found in _READ_BY:
        remedy = f"format {found} is read by mtrl_lightning {_READ_BY[found]}: use that version"
    else:
        remedy = "use the version that wrote it"
    raise ConfigurationError(
        f"the checkpoint has format {found}, this version reads {FORMAT}: {remedy}"
    )
