"""Rings of transitions, one a task, in memory.

Shapes: ``R`` rings, ``C`` rows a ring, ``N`` rows of an addition.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.memory import CPU, free_memory, to_device
from mtrl_lightning.types import EnvSpec


class Rows(NamedTuple):
    """Transitions without their task: tensors in memory, arrays on disk."""

    observation: Tensor
    action: Tensor
    reward: Tensor
    next_observation: Tensor
    terminated: Tensor


def _layout(spec: EnvSpec) -> list[tuple[tuple[int, ...], torch.dtype]]:
    kind = spec.observation_space.dtype
    dtype = (
        torch.float32
        if kind is None or np.issubdtype(kind, np.floating)
        else torch.from_numpy(np.empty(0, kind)).dtype
    )
    observation = (tuple(spec.observation_space.shape), dtype)
    action = (tuple(spec.action_space.shape), torch.float32)
    return [observation, action, ((), torch.float32), observation, ((), torch.bool)]


def bytes_needed(spec: EnvSpec, num_rows: int) -> int:
    """Return the bytes that ``num_rows`` transitions take."""
    return num_rows * sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in _layout(spec))


class RingStorage:
    """Equal rings of transitions.

    Args:
        spec: shapes and types of what is stored; floating-point observations are stored as float32.
        num_rings: number of rings, ``R``.
        capacity: rows a ring, ``C``.
        folder: keep the rows in files here, mapped into memory, which vanish with this process;
            None for memory.
        device: whose memory, without a folder.

    Raises:
        ConfigurationError: if there is not enough free memory, or disk; nothing is taken then.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_rings: int,
        capacity: int,
        folder: Path | None = None,
        device: torch.device = CPU,
    ) -> None:
        needed = bytes_needed(spec, num_rings * capacity)
        free = free_memory(device) if folder is None else shutil.disk_usage(folder).free
        if needed > free:
            most, where = (
                int(num_rings * capacity * free / needed),
                "memory" if folder is None else f"disk in {folder}",
            )
            raise ConfigurationError(
                f"a replay of {num_rings * capacity:,} transitions needs {needed / 2**30:.1f} GiB"
                f" of {where} and"
                f" {free / 2**30:.1f} GiB are free: lower data.capacity to at most {most:,}"
            )
        self.capacity = capacity
        self.added_R = np.zeros(num_rings, np.int64)
        """Rows ever added to each ring; the next one goes to this number modulo the capacity."""
        self.oldest_R = np.zeros(num_rings, np.int64)
        """Rows before these, counted likewise, were never restored."""
        shapes = [((num_rings * capacity, *shape), dtype) for shape, dtype in _layout(spec)]
        self._flat = Rows(*(_empty(shape, dtype, folder, device) for shape, dtype in shapes))
        self._arrays = [field.numpy() for field in self._flat] if device == CPU else None

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self._flat.reward.device

    @property
    def num_rings(self) -> int:
        """Number of rings."""
        return len(self.added_R)

    @property
    def size_R(self) -> npt.NDArray[np.int64]:
        """Rows that each ring holds."""
        return np.minimum(self.added_R - self.oldest_R, self.capacity)

    def add(self, ring_N: npt.NDArray[np.int64], rows: Rows | tuple[npt.NDArray, ...]) -> None:
        """Append rows to rings, over the oldest once a ring is full; a ring's rows keep their order."""
        counts_R = np.bincount(ring_N, minlength=self.num_rings)
        assert counts_R.max(initial=0) <= self.capacity, "more rows at once than a ring holds"
        place_N = self.added_R[ring_N]
        if counts_R.max(initial=0) > 1:
            order_N = np.argsort(ring_N, kind="stable")
            place_N[order_N] += np.arange(len(ring_N)) - np.repeat(
                np.cumsum(counts_R) - counts_R, counts_R
            )
        index_N = ring_N * self.capacity + place_N % self.capacity
        if self._arrays is not None:  # a fifth of the time that tensors take
            for array, source in zip(self._arrays, rows, strict=True):
                array[index_N] = source
        else:
            index = to_device(index_N, self.device)
            for target, source in zip(self._flat, rows, strict=True):
                target[index] = to_device(torch.as_tensor(source).to(target.dtype), self.device)
        self.added_R += counts_R

    def places(self, ring: int, first: int, end: int) -> Tensor:
        """Return the flat places of a ring's rows ``first`` to ``end``, counted since the beginning and still there."""
        assert self.added_R[ring] - self.size_R[ring] <= first <= end <= self.added_R[ring]
        return ring * self.capacity + torch.arange(first, end) % self.capacity

    def mean_rewards(self) -> npt.NDArray[np.float64]:
        """Return the mean reward of the rows that each ring holds, ``[R]``."""
        ends = zip(self.added_R - self.size_R, self.added_R, strict=True)
        places = [self.places(ring, int(first), int(end)) for ring, (first, end) in enumerate(ends)]
        return np.array(
            [
                float(self._flat.reward[to_device(place, self.device)].double().mean())
                for place in places
            ]
        )

    def take(self, index: Tensor) -> Rows:
        """Return copies of the rows at flat places ``ring * capacity + row``, on this storage's device."""
        index = to_device(index, self.device)
        return Rows(*(field.index_select(0, index) for field in self._flat))


def _empty(
    shape: tuple[int, ...], dtype: torch.dtype, folder: Path | None, device: torch.device
) -> Tensor:
    if folder is None:
        return torch.empty(shape, dtype=dtype, device=device)
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    with tempfile.TemporaryFile(dir=folder) as file:
        size = int(np.prod(shape)) * kind.itemsize
        if hasattr(
            os, "posix_fallocate"
        ):  # a disk that fills up later would end the process without an error
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return torch.from_numpy(np.memmap(file, kind, "r+", shape=shape))
