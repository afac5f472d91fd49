"""Devices: copies to them, free memory, threads."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

CPU = torch.device("cpu")
_M_TRIM_THRESHOLD = -1  # constants of glibc's malloc.h
_M_MMAP_THRESHOLD = -3
_FREED_BYTES_KEPT = 1 << 30  # enough for the activations of large networks
_OLDER_GLIBC_MAX_MMAP_THRESHOLD = 1 << 25
CGROUP = Path("/sys/fs/cgroup")
"""Folder in which Linux reports a container's memory limit and usage."""


def to_device(array: Any, device: torch.device) -> Tensor:
    """Copy an array or a tensor to the device; a copy to a GPU is asynchronous."""
    # no pinning, which costs more than it saves; CUDA has read pageable memory on return
    return torch.as_tensor(array).to(device, non_blocking=device.type == "cuda")


def free_memory(device: torch.device = CPU) -> int:
    """Return the bytes that this process can still allocate, respecting container limits."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limit_file = CGROUP / "memory.max"
    used_file = CGROUP / "memory.current"
    if limit_file.exists() and used_file.exists():
        limit = limit_file.read_text().strip()
        if limit.isdigit():  # "max" if there is no limit
            used = int(used_file.read_text()) - _reclaimable_bytes()
            free = min(free, int(limit) - used)
    return max(0, free)


def _reclaimable_bytes() -> int:
    """Return the bytes of reclaimable page cache in the container's memory."""
    with contextlib.suppress(OSError):
        for line in (CGROUP / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    return 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of PyTorch is an out-of-memory error."""
    is_of_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return is_of_cpu or isinstance(error, torch.OutOfMemoryError)


def keep_freed_memory(num_bytes: int = _FREED_BYTES_KEPT) -> bool:
    """Make the process keep freed memory for later allocations, without affecting results.

    Otherwise, glibc returns the activations of a layer to the operating system after every update,
    and the next update causes thousands of page faults.

    This is a process-wide setting. Only the command line calls it (and the benchmarks, which
    measure its effect): importing the package or training from Python does not. Call it yourself
    to get the same speed from Python.

    Args:
        num_bytes: maximum number of freed bytes to keep.

    Returns:
        Whether the setting was applied. It requires glibc, the usual C library of Linux.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    if mallopt(_M_TRIM_THRESHOLD, num_bytes) != 1:
        return False
    sizes = (num_bytes, _OLDER_GLIBC_MAX_MMAP_THRESHOLD)
    return any(mallopt(_M_MMAP_THRESHOLD, size) == 1 for size in sizes)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread while environments are stepped without updates.

    PyTorch's threads spin for some milliseconds after an operation, on cores that worker processes
    need.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
