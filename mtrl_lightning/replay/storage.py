"""Storages of transitions: one ring per training environment.

An episode's steps are consecutive in its environment's ring. Shapes: ``E`` environments (rings),
``C`` transitions in a ring, ``N`` transitions to add or to return.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import Field
from mtrl_lightning.utils.devices import CPU, free_memory, to_device

Columns: TypeAlias = Mapping[str, Any]
"""Fields of transitions by name: arrays or tensors ``[N, ...]``."""


Numbers = TypeVar("Numbers", npt.NDArray[np.int64], Tensor)
"""Integers as a NumPy array or a tensor; results are of the same type."""


def bytes_needed(fields: Sequence[Field], num_rows: int) -> int:
    """Return the size of ``num_rows`` transitions in bytes if all fields are stored unchanged."""
    return num_rows * sum(field.num_bytes for field in fields)


class Storage(ABC):
    """Rings of transitions; determines how they are stored and which of them can be sampled.

    A transition is identified by its ring and its number, the number of transitions added to that
    ring before it. ``ReplayBuffer`` samples numbers from ``added_E - size_E`` to ``added_E - 1``; a
    storage that no longer has all of these reduces ``size_E``.

    Args:
        fields: the schema of a transition, see ``transition_fields``.
        num_envs: number of rings, ``E``.
        capacity: transitions in a ring, ``C``.
    """

    def __init__(self, fields: Sequence[Field], num_envs: int, capacity: int) -> None:
        self.fields = tuple(fields)
        self.capacity = capacity
        self.added_E = np.zeros(num_envs, np.int64)
        """Number of transitions ever added to each ring."""
        self.oldest_E = np.zeros(num_envs, np.int64)
        """Number of the first transition of each ring that was restored from a checkpoint."""

    @property
    def num_envs(self) -> int:
        """Number of rings."""
        return len(self.added_E)

    @property
    def size_E(self) -> npt.NDArray[np.int64]:
        """Number of each ring's newest transitions that can be sampled."""
        return np.minimum(self.added_E - self.oldest_E, self.capacity)

    @property
    def guaranteed_size(self) -> int:
        """Minimum number of transitions that a full ring stores."""
        return self.capacity

    @property
    def row_bytes(self) -> int:
        """Bytes of one transition in a file."""
        return bytes_needed(self.fields, 1)

    @property
    def layout(self) -> dict[str, Any]:
        """File layout, recorded in checkpoints; empty for full rows."""
        return {}

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns of a chunk file, in order."""
        return tuple(field.name for field in self.fields)

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the transitions."""

    @abstractmethod
    def add(self, env_N: npt.NDArray[np.int64], columns: Columns) -> None:
        """Append transitions, in chronological order within each ring."""

    @abstractmethod
    def take(self, env_N: Tensor, number_N: Tensor) -> dict[str, Tensor]:
        """Return copies of transitions by ring and number, on this storage's device."""

    def rows_of(self, env_N: Numbers, number_N: Numbers) -> Numbers:
        """Return the row of each transition in columns of all rings, by ring and number."""
        return env_N * self.capacity + number_N % self.capacity

    def numbers(self, env: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return ring and number of a ring's transitions ``first`` to ``end - 1``, for ``take``."""
        assert self.added_E[env] - self.size_E[env] <= first <= end <= self.added_E[env]
        return torch.full((end - first,), env), torch.arange(first, end)

    def restore_from(self, first_E: npt.NDArray[np.int64]) -> None:
        """Continue with the numbers ``first_E``, skipping the transitions before them."""
        self.added_E[:] = first_E

    def to_columns(
        self, first_E: npt.NDArray[np.int64], end_E: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray]:
        """Return the columns of a chunk file: each ring's transitions ``first_E`` to ``end_E - 1``.

        The columns have the names ``column_names``.
        """
        env_N, number_N = map(torch.from_numpy, enumerated(first_E, end_E - first_E))
        return {name: column.cpu().numpy() for name, column in self.take(env_N, number_N).items()}

    def from_columns(
        self,
        columns: Columns,
        first_E: npt.NDArray[np.int64],
        end_E: npt.NDArray[np.int64],
        ring_E: npt.NDArray[np.int64],
    ) -> None:
        """Append the columns of ``to_columns`` under their numbers, to the same rings or others.

        Args:
            columns: columns of a chunk file.
            first_E: number of each ring's first transition in the file.
            end_E: number after each ring's last transition in the file.
            ring_E: this storage's ring for each ring in the file; -1 for none.

        Raises:
            ValueError: if the columns are inconsistent.
        """
        here_N, _, is_kept_N = self._continue_in(first_E, end_E, ring_E)
        kept: Any = slice(None) if is_kept_N.all() else is_kept_N
        self.add(here_N, {name: column[kept] for name, column in columns.items()})

    def _continue_in(
        self,
        first_E: npt.NDArray[np.int64],
        end_E: npt.NDArray[np.int64],
        ring_E: npt.NDArray[np.int64],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Continue the target rings with the first numbers of a file.

        Returns:
            Ring and number of each transition that is kept, and their mask over the file.
        """
        start_E = self.added_E.copy()
        is_kept_E = ring_E >= 0
        start_E[ring_E[is_kept_E]] = first_E[is_kept_E]
        self.restore_from(start_E)
        env_N, number_N = enumerated(first_E, end_E - first_E)
        is_kept_N = is_kept_E[env_N]
        return ring_E[env_N[is_kept_N]], number_N[is_kept_N], is_kept_N

    @abstractmethod
    def reward_sums(self) -> npt.NDArray[np.float64]:
        """Return the sum of the rewards in each ring, ``[E]``."""


class RingStorage(Storage):
    """Store all fields of transitions unchanged.

    Args:
        fields: the schema of a transition.
        num_envs: number of rings, ``E``.
        capacity: transitions in a ring, ``C``.
        folder: folder of memory-mapped files for the transitions, which disappear with this
            process; None to keep them in memory.
        device: device of the transitions, without a folder.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        num_envs: int,
        capacity: int,
        folder: Path | None = None,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(fields, num_envs, capacity)
        num_rows = num_envs * capacity
        check_room(bytes_needed(fields, num_rows), num_rows, folder, device)
        self._columns = {
            field.name: empty_column(field, num_rows, folder, device) for field in fields
        }
        self._arrays = None
        if device == CPU:
            self._arrays = {name: column.numpy() for name, column in self._columns.items()}

    @property
    def device(self) -> torch.device:
        """Where the transitions are kept."""
        return self._columns["reward"].device

    def reward_sums(self, size_E: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float64]:
        """Return the sum of the rewards of each ring's newest ``size_E`` transitions, or of all."""
        sums = np.zeros(self.num_envs)
        size_E = self.size_E if size_E is None else size_E
        for env, (added, size) in enumerate(zip(self.added_E, size_E, strict=True)):
            rows = self.rows_of(*self.numbers(env, int(added - size), int(added)))
            row_N = to_device(rows, self.device)
            sums[env] = float(self._columns["reward"][row_N].double().sum())
        return sums

    def add(self, env_N: npt.NDArray[np.int64], columns: Columns) -> None:
        """Append transitions, overwriting the oldest ones if a ring is full."""
        counts_E = np.bincount(env_N, minlength=self.num_envs)
        assert counts_E.max(initial=0) <= self.capacity, "more transitions than a ring holds"
        number_N = self.added_E[env_N]
        # the i-th new transition of a ring has the number added + i
        if counts_E.max(initial=0) > 1:
            order_N = np.argsort(env_N, kind="stable")
            before_E = np.cumsum(counts_E) - counts_E
            number_N[order_N] += np.arange(len(env_N)) - np.repeat(before_E, counts_E)
        row_N = self.rows_of(env_N, number_N)
        if self._arrays is not None:  # five times faster than tensors
            for name, array in self._arrays.items():
                array[row_N] = columns[name]
        else:
            # converted before the copy, because float32 halves the bytes of NumPy's float64
            rows = to_device(row_N, self.device)
            for name, column in self._columns.items():
                values = torch.as_tensor(columns[name]).to(column.dtype)
                column[rows] = to_device(values, self.device)
        self.added_E += counts_E

    def take(self, env_N: Tensor, number_N: Tensor) -> dict[str, Tensor]:
        """Return copies of transitions by ring and number, on this storage's device."""
        row_N = to_device(self.rows_of(env_N, number_N), self.device)
        return {name: column.index_select(0, row_N) for name, column in self._columns.items()}


def enumerated(
    first_E: npt.NDArray[np.int64], count_E: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ring and number of each ring's ``count_E`` consecutive items from ``first_E`` on."""
    env_N = np.repeat(np.arange(len(first_E)), count_E)
    before_E = np.cumsum(count_E) - count_E
    return env_N, first_E[env_N] + np.arange(len(env_N)) - before_E[env_N]


def check_room(needed: int, num_rows: int, folder: Path | None, device: torch.device) -> None:
    """Check that a replay fits into memory, or on the disk of a folder.

    Args:
        needed: size of the full replay in bytes.
        num_rows: its number of transitions.
        folder: folder of its files; None for memory.
        device: device of the memory.
    """
    free = free_memory(device) if folder is None else shutil.disk_usage(folder).free
    if needed > free:
        where = "memory" if folder is None else f"disk in {folder}"
        raise ConfigurationError(
            f"a replay of {num_rows:,} transitions needs {needed / 2**30:.1f} GiB of {where},"
            f" but only {free / 2**30:.1f} GiB are free:"
            f" lower data.capacity to at most {int(num_rows * free / needed):,}"
        )


def empty_column(field: Field, num_rows: int, folder: Path | None, device: torch.device) -> Tensor:
    """Allocate a field of ``num_rows`` transitions, in memory or in a file in a folder."""
    shape = (num_rows, *field.shape)
    dtype = np.dtype(field.dtype)
    if folder is None:
        return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device=device)
    size = num_rows * field.num_bytes
    with tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            # allocate now: if the disk fills up later, the process would crash
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return torch.from_numpy(np.memmap(file, dtype, "r+", shape=shape))
