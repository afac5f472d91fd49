"""Read a checkpoint file: check its checksums and its format, and execute nothing in it."""

from __future__ import annotations

import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mtrl_lightning.checkpoints.pickles import check_pickle
from mtrl_lightning.checks import count, restoring
from mtrl_lightning.errors import ConfigurationError

FORMAT = 3
"""Version of the checkpoint's format."""
_READ_BY = {2: "0.1"}
"""The version of this package that reads an earlier format."""
CONTAINERS = (dict, OrderedDict, list, tuple, set)
PLAIN = (type(None), bool, int, float, str, bytes, torch.Size, torch.device, torch.dtype)
MAX_DEPTH = 320
"""How many containers may lie in one another."""
MAX_USES = 16
"""Most values per byte of the pickle, and bytes of tensors per byte of the file: several names may
share a value. Real files stay below 2."""
MAX_INTEGER_BITS = 2040
"""Of the largest integer that PyTorch reads."""
END_BYTES = 56 + 20 + 22
"""The records that end an archive of 64-bit sizes: two of its directory, and the last."""
SECTIONS: dict[str, type] = {
    "callbacks": dict,
    "loops": dict,
    "lr_schedulers": list,
    "optimizer_states": list,
    "state_dict": dict,
}
"""The sections of a checkpoint that Lightning reads."""
LIGHTNING_VERSION = re.compile(r"([2-9]|[1-9]\d)(\.\d{1,4}){1,3}((a|b|rc|\.post|\.dev)\d{1,8})?")
"""Versions of Lightning whose checkpoints it does not convert."""


def load_checkpoint(path: str | Path, verify: bool = True, mmap: bool = True) -> dict[str, Any]:
    """Read a checkpoint's plain values.

    Args:
        path: the file.
        verify: whether the checksums of its tensors are compared, for which all of it is read.
        mmap: whether tensors stay on disk until they are used.

    Raises:
        ConfigurationError: if the file is missing, damaged, of another format, or holds anything
            but tensors and plain values.
    """
    if not Path(path).is_file():
        raise ConfigurationError(
            f"there is no checkpoint {path}: give a file in a run's checkpoints/ folder"
        )
    try:
        _check_archive(Path(path), verify)
        pickled = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
        check_pickle(pickled)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        check_plain(loaded, len(pickled), Path(path).stat().st_size)
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


def _check_archive(path: Path, verify: bool) -> None:
    """Check that a file is an archive whose members lie in it as they are.

    Raises:
        BadZipFile: if members are compressed, overlap, or have wrong checksums, or if other readers
            of archives may find other members.
    """
    size = path.stat().st_size
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise zipfile.BadZipFile("a member is compressed")
        if sum(member.file_size for member in members) > size:
            raise zipfile.BadZipFile("its members are larger than the file")
        if _directory_start(file, size) != archive.start_dir:
            raise zipfile.BadZipFile("its directory is not where the file says")
        # torch compares no checksum of mapped memory
        damaged = archive.testzip() if verify else None
    if damaged is not None:
        raise zipfile.BadZipFile(f"wrong checksum of {damaged}")


def _directory_start(file: BinaryIO, size: int) -> int:
    """Return where an archive's last bytes say that its directory starts.

    PyTorch's reader believes them; Python's computes the offset from the size of the directory.

    Raises:
        BadZipFile: if the archive's end is not the file's.
    """
    file.seek(max(size - END_BYTES, 0))
    end = file.read().rjust(END_BYTES)
    record, locator, last = end[:56], end[56:76], end[76:]
    if last[:4] != b"PK\5\6" or last[20:] != b"\0\0":
        raise zipfile.BadZipFile("something follows the archive")
    if locator[:4] != b"PK\6\7":
        return int.from_bytes(last[16:20], "little")
    if record[:4] != b"PK\6\6" or int.from_bytes(locator[8:16], "little") != size - END_BYTES:
        raise zipfile.BadZipFile("its end is not where the file says")
    return int.from_bytes(record[48:56], "little")


def check_plain(loaded: Any, num_pickled: int, file_size: int) -> None:
    """Check that all that was read is tensors and plain values, and no more than a file can hold.

    Containers that lie in the file once and are named often would unfold to any size.

    Args:
        loaded: the values read.
        num_pickled: bytes of the file's pickle, which holds the values.
        file_size: bytes of the file, which holds the tensors.

    Raises:
        ValueError: naming the mistake.
    """
    num_values = 0
    num_bytes = 0
    levels: list[Iterator[Any]] = [iter([loaded])]
    end = object()
    while levels:
        value: Any = next(levels[-1], end)
        if value is end:
            levels.pop()
            continue
        num_values += 1
        if type(value) in CONTAINERS:
            levels.append(_content(value))
        elif type(value) in (Tensor, torch.nn.Parameter):
            num_bytes += value.numel() * value.element_size()
            if num_bytes > MAX_USES * file_size:
                raise ValueError("its tensors are more than a file of its size can hold")
            _check_tensor(value)
        elif type(value) not in PLAIN:
            raise ValueError(f"it holds a {type(value).__name__}, no plain value")
        elif type(value) is int and value.bit_length() > MAX_INTEGER_BITS:
            raise ValueError(f"it holds an integer of {value.bit_length():,} bits")
        if len(levels) > MAX_DEPTH + 1:  # the first level holds the whole
            raise ValueError(f"more than {MAX_DEPTH} containers lie in one another")
        if num_values > MAX_USES * num_pickled:
            raise ValueError("its values are more than a file of its size can hold")


def _content(container: Any) -> Iterator[Any]:
    """Return keys, values and attributes of a container."""
    values = container.values() if isinstance(container, dict) else ()
    attributes = vars(container).values() if isinstance(container, OrderedDict) else ()
    return chain(container, values, attributes)


def _check_tensor(tensor: Tensor) -> None:
    """Check that a tensor is a plain one.

    Raises:
        ValueError: if it is sparse, quantized, on another device, has attributes, or has booleans
            that are neither 0 nor 1.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise ValueError("it holds a tensor that is sparse, quantized or of a device")
    if vars(tensor):
        raise ValueError("it holds a tensor with attributes")
    if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise ValueError("it holds a boolean that is neither 0 nor 1")


def env_steps_of(checkpoint: dict[str, Any]) -> int:
    """Return the environment steps that a loaded checkpoint's run had made.

    Raises:
        ConfigurationError: if the checkpoint is damaged.
    """
    with restoring("counters"):
        return count(checkpoint["mtrl_lightning"]["counters"]["env_steps"], "env_steps")


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


def check_format(checkpoint: dict[str, Any]) -> None:
    """Check that a loaded checkpoint was written by this package, in the format of this version.

    Raises:
        ConfigurationError: if it was not.
    """
    _check_version(checkpoint)
    for name, kind in SECTIONS.items():
        value = checkpoint.get(name, kind())
        if not isinstance(value, kind):
            raise ConfigurationError(
                f"the checkpoint's {name} is a {type(value).__name__}: it is damaged;"
                " use another one"
            )
    with restoring("sections"):
        count(checkpoint.get("epoch", 0), "epoch")
        count(checkpoint.get("global_step", 0), "global_step")
        if not LIGHTNING_VERSION.fullmatch(checkpoint.get("pytorch-lightning_version", "2.0")):
            raise ValueError("pytorch-lightning_version is not 2.0 or later")


def _check_version(checkpoint: Any) -> None:
    state = checkpoint.get("mtrl_lightning") if isinstance(checkpoint, dict) else None
    if not isinstance(state, dict) or "format" not in state:
        raise ConfigurationError(
            "the checkpoint was not written by mtrl_lightning: give one of a run's checkpoints"
        )
    with restoring("format"):
        version = count(state["format"], "format")
    if version == FORMAT:
        return
    hint = "use the version that wrote it"
    if version in _READ_BY:
        hint = f"format {version} is read by mtrl_lightning {_READ_BY[version]}: use that version"
    raise ConfigurationError(
        f"the checkpoint has format {version}, this version reads {FORMAT}: {hint}"
    )
