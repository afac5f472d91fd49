"""A replay from which the device samples by itself, so that a graph of updates samples its batches.

Shapes: ``E`` environments (rings), ``C`` transitions in a ring, ``N`` transitions of an addition or
a request, ``W`` numbers of a transition.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.devices import CPU, to_device
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay.buffer import ReplayBuffer, batch_of, check_totals
from mtrl_lightning.replay.storage import Columns, RingStorage
from mtrl_lightning.schema import transition_fields
from mtrl_lightning.spec import EnvSpec, Field
from mtrl_lightning.types import TransitionBatch

PACKED = ("float32", "bool")
"""Types that single-precision numbers hold exactly, of which rows are made."""


def can_be_packed(fields: Sequence[Field]) -> bool:
    """Return whether all fields of a transition fit into one row of single-precision numbers."""
    return all(field.dtype in PACKED for field in fields)


class Upload:
    """Copies arrays to a device, for which neither the host nor the device's work waits.

    To a GPU they go through pinned memory, a ring of slots: a slot is reused when its last copy
    is over. Copies use a separate stream and overtake queued updates; work queued after a copy
    waits for it. Elsewhere a copy is made at once.

    Args:
        device: that the copies are on.
        num_slots: copies that may be under way.
    """

    def __init__(self, device: torch.device, num_slots: int = 8) -> None:
        self._device = device
        self._slots: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._next = 0
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._slots = [torch.empty(0, dtype=torch.uint8)] * num_slots
            self._copied = [torch.cuda.Event() for _ in range(num_slots)]

    def __call__(self, array: Any) -> Tensor:
        """Return an array on the device."""
        tensor = torch.as_tensor(array)
        if not self._slots:
            return tensor.to(self._device)
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        self._copied[slot].synchronize()
        num_bytes = tensor.numel() * tensor.element_size()
        if len(self._slots[slot]) < num_bytes:
            self._slots[slot] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        pinned = self._slots[slot][:num_bytes].view(tensor.dtype).view(tensor.shape)
        pinned.copy_(tensor)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = pinned.to(self._device, non_blocking=True)
            self._copied[slot].record()
        current.wait_event(self._copied[slot])
        # the stream of the copies owns its memory, and must not reuse it before it was read
        copy.record_stream(current)
        return copy


class PackedStorage(RingStorage):
    """Keep a transition as one row of single-precision numbers, which is read and written at once.

    It is built as ``RingStorage``, with fields that ``can_be_packed`` and without a folder.
    """

    def _make_columns(
        self, num_rows: int, folder: Path | None, device: torch.device
    ) -> dict[str, Tensor]:
        """Return every field as a view of the rows."""
        assert folder is None and can_be_packed(self.fields)
        self._upload = Upload(device)
        width = sum(_width(field) for field in self.fields)
        self._row_NW = torch.empty(num_rows, width, device=device)
        return self._views(self._row_NW)

    def take(self, env_N: Tensor, number_N: Tensor) -> dict[str, Tensor]:
        """Return transitions by ring and number: views of one copy."""
        row_N = to_device(self.rows_of(env_N, number_N), self.device)
        columns = self._views(self._row_NW.index_select(0, row_N))
        for field in self.fields:
            if field.dtype == "bool":
                columns[field.name] = columns[field.name] != 0
        return columns

    def _write(self, row_N: npt.NDArray[np.int64], columns: Columns) -> None:
        """Write transitions, which go over in one copy."""
        values_NW = np.empty((len(row_N), self._row_NW.shape[1]), np.float32)
        start = 0
        for field in self.fields:
            end = start + _width(field)
            # with the width, as no rows would not say it
            column_Nw = np.asarray(columns[field.name]).reshape(len(row_N), end - start)
            values_NW[:, start:end] = column_Nw
            start = end
        # index_copy_ comes after the batches that queued updates sample: they are on one stream
        self._row_NW.index_copy_(0, self._upload(row_N), self._upload(values_NW))

    def _views(self, row_NW: Tensor) -> dict[str, Tensor]:
        widths = [_width(field) for field in self.fields]
        parts = row_NW.split(widths, 1)
        return {
            field.name: part.unflatten(1, field.shape) if field.shape else part[:, 0]
            for field, part in zip(self.fields, parts, strict=True)
        }


def _width(field: Field) -> int:
    return int(np.prod(field.shape))


class DeviceReplay(ReplayBuffer):
    """A replay on a device that samples its batches there, without the host.

    The sizes of the rings are kept on the device as well, and brought there before the updates that
    sample: ``prepare`` is called outside the graph, ``take`` within.

    Args:
        spec: the trained tasks, shapes and types; observations are not stacked frames.
        capacity: transitions of all environments, an equal share for each.
        batch_size: rows of a batch that ``take`` returns.
        seed: of the random numbers, which differ between processes.
        tasks: the task of each environment; None for one environment per trained task.
        device: whose memory, and which samples.
        policy_fields: further fields of a transition, which the policy's ``act`` returns.

    Raises:
        ConfigurationError: if the capacity gives an environment no row, or memory is short.
    """

    def __init__(
        self,
        spec: EnvSpec,
        capacity: int,
        batch_size: int,
        seed: int = 0,
        *,
        tasks: Sequence[int] | None = None,
        device: torch.device = CPU,
        policy_fields: Sequence[Field] = (),
    ) -> None:
        packs = can_be_packed(transition_fields(spec, policy_fields))
        super().__init__(
            spec,
            capacity,
            seed,
            tasks=tasks,
            device=device,
            policy_fields=policy_fields,
            storage=PackedStorage if packs else RingStorage,
        )
        self._num_rows = batch_size // len(spec.train_tasks)
        self._generator = torch.Generator(device).manual_seed(distributed.seed_of_rank(seed))
        self._rings_on_host = self._ring_RM, self._is_ring_RM
        self._ring_RM = self._ring_RM.to(device)
        self._is_ring_RM = self._is_ring_RM.to(device)
        self._upload = Upload(device)
        num_envs = self.storage.num_envs
        self._sizes_2E = torch.zeros(2, num_envs, dtype=torch.int64, device=device)
        """Of each ring the number of transitions, and the number of the oldest."""
        self._sent_2E = np.full((2, num_envs), -1)
        """The same, as the host last sent them."""

    def sample(self, batch_size: int) -> TransitionBatch:
        """Sample ``batch_size // R`` rows of each trained task.

        Raises:
            ConfigurationError: if a task has no transition yet.
        """
        self.prepare(1)
        return self._draw(batch_size // len(self._task_R))

    def prepare(self, num_updates: int) -> Sequence[Hashable]:
        """Tell the device how many transitions there are; all batches have the same shapes.

        Raises:
            ConfigurationError: if a task has no transition yet.
        """
        size_E = self.storage.size_E
        sizes_2E = np.stack([size_E, self.storage.added_E - size_E])
        if not np.array_equal(sizes_2E, self._sent_2E):
            ring_RM, is_ring_RM = self._rings_on_host
            size_RM = torch.where(is_ring_RM, torch.from_numpy(size_E)[ring_RM], 0)
            check_totals(size_RM.sum(1))
            self._sizes_2E.copy_(self._upload(sizes_2E))
            self._sent_2E = sizes_2E
        return [()] * num_updates

    def take(self, index: int) -> TransitionBatch:
        """Sample a batch; only operations of the device, on tensors that stay the same ones."""
        return self._draw(self._num_rows)

    def random_generators(self) -> Sequence[torch.Generator]:
        """Return the generator of the samples."""
        return [self._generator]

    def state_dict(self) -> dict[str, Any]:
        """Return the generator, and on which kind of device it samples."""
        return {**super().state_dict(), "device": self._generator.device.type}

    def _draw(self, num_rows: int) -> TransitionBatch:
        rows = self.storage.take(*self._sample_rows(num_rows))
        return batch_of(rows, self._task_R)

    def _sizes(self) -> tuple[Tensor, Tensor]:
        """Return each ring's number of transitions and the number of its oldest, ``[E]``."""
        return self._sizes_2E[0], self._sizes_2E[1]

    def _check_totals(self, total_R1: Tensor) -> None:
        """Do nothing: it would wait for the device, and ``prepare`` has looked at the host's."""
