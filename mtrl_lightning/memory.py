"""Memory: what this process may take of it, what it keeps, and the way to a device's."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT = 1 << 30
"""Bytes, enough for the activations of large networks."""
MOST_IN_OLDER_GLIBC = 1 << 25
CPU = torch.device("cpu")


def free_memory(device: torch.device = CPU) -> int:
    """Return the bytes that this process may still take, also inside a container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (most := limit.read_text().strip()).isdigit():
        free = min(free, int(most) - int(used.read_text()))
    return free


def keep_freed_memory(num_bytes: int = KEPT) -> bool:
    """Let this process keep up to so many freed bytes for what it allocates next.

    Otherwise glibc gives a layer's activations back to the system after every update, and the next
    update waits for thousands of page faults. It changes no number.

    Returns:
        Whether glibc, the usual C library of Linux, was told so; there is no way to tell another.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    tell = ctypes.CDLL(None).mallopt
    kept = tell(_M_TRIM_THRESHOLD, num_bytes) == 1
    return kept and any(
        tell(_M_MMAP_THRESHOLD, size) == 1 for size in (num_bytes, MOST_IN_OLDER_GLIBC)
    )


def to_device(array: Any, device: torch.device) -> Tensor:
    """Return a NumPy array or a tensor on the device; the copy to a GPU is under way when this returns."""
    tensor = torch.as_tensor(array)
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
