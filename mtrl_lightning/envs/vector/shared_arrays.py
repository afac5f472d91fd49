"""Shared-memory arrays through which environments receive actions and return steps."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import uuid
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.spec import EnvSpec, Field
from mtrl_lightning.transitions import array_fields

StepArrays = dict[str, npt.NDArray]
"""Arrays by field name, with one row per environment."""

CACHE_LINE = 64
"""Alignment in bytes: each array starts on its own cache line."""


def num_bytes(num_envs: int, spec: EnvSpec) -> int:
    """Return the size of the buffer that ``arrays_in`` needs."""
    return sum(_padded_bytes(field, num_envs) for field in array_fields(spec))


def arrays_in(buffer: Any, num_envs: int, spec: EnvSpec) -> StepArrays:
    """Lay out the arrays in a buffer of ``num_bytes(num_envs, spec)`` bytes."""
    arrays: StepArrays = {}
    offset = 0
    for field in array_fields(spec):
        shape = (num_envs, *field.shape)
        count = int(np.prod(shape))
        arrays[field.name] = np.frombuffer(buffer, field.dtype, count, offset).reshape(shape)
        offset += _padded_bytes(field, num_envs)
    return arrays


def _padded_bytes(field: Field, num_envs: int) -> int:
    lines = -(-field.num_bytes * num_envs // CACHE_LINE)
    return lines * CACHE_LINE


class SharedMemory:
    """Zero-initialized memory that a process shares with its workers.

    On POSIX, it is an unnamed file that workers inherit. On Windows, it has a name, and is freed
    when the last process closes it. Nothing is left behind, even if all processes are killed.

    Args:
        num_bytes: size of the memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.handle: int | str
        """The argument of ``open_memory`` in a worker: a file descriptor, or a name on Windows."""
        if sys.platform == "win32":
            self.handle = f"mtrl_lightning-{uuid.uuid4()}"
        else:
            self.handle = _nameless_file(num_bytes)
            weakref.finalize(self, os.close, self.handle)
        self.buffer = open_memory(self.handle, num_bytes)


def open_memory(handle: int | str, num_bytes: int) -> mmap.mmap:
    """Map memory created by this process or its parent."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes, tagname=handle)
    assert isinstance(handle, int)
    return mmap.mmap(handle, num_bytes)


def _nameless_file(num_bytes: int) -> int:
    """Return the descriptor of a file of zeros: in memory on Linux, otherwise a deleted file."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("mtrl_lightning")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
