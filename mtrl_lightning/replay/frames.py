"""A storage of deduplicated frames, from which stacked observations are built when sampled.

An observation of ``W`` stacked frames shares all but one with its successor, so that a plain
storage would store each frame ``2 W`` times. Here it is stored once.

Shapes: ``E`` environments (rings), ``C`` transitions in a ring, ``F`` frames in a ring, ``W``
frames of an observation, ``N`` transitions of an addition or a request, ``M`` frames of a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay.frame_columns import (
    FRAME_COLUMNS,
    FRAME_INDEX,
    compressed,
    decompressed,
    other_fields_of,
    stack_of,
)
from mtrl_lightning.replay.sizes import frame_bytes_needed, frames_per_ring
from mtrl_lightning.replay.storage import (
    Columns,
    RingStorage,
    Storage,
    bytes_needed,
    check_room,
    empty_column,
    enumerated,
)
from mtrl_lightning.spec import Field
from mtrl_lightning.utils.devices import CPU, to_device


class FrameStorage(Storage):
    """Store each frame of stacked observations once.

    The stacks are built when transitions are sampled: at the start of an episode, the first frame
    is repeated; the true successor at the end of an episode is stored. A transition that does not
    continue the previous one (a new episode, a rebuilt environment) starts with its own frames.
    A ring has capacity for the frames of episodes of ``horizon`` steps. If episodes are shorter,
    frames are overwritten before transitions, and ``size_E`` excludes the incomplete ones.

    Args:
        fields: the schema of a transition; its observations are stacks ``[W, ...]`` with the newest
            frame last.
        num_envs: number of rings, ``E``.
        capacity: transitions in a ring, ``C``.
        folder: folder of a memory-mapped file for the frames, which disappears with this process;
            None to keep them in memory.
        device: device of the frames, without a folder.
        horizon: steps of an episode, which determines the number of frames in a ring.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        num_envs: int,
        capacity: int,
        folder: Path | None = None,
        device: torch.device = CPU,
        *,
        horizon: int,
    ) -> None:
        super().__init__(fields, num_envs, capacity)
        stack = stack_of(fields)
        self._stack_size = stack.shape[0]
        self._num_frames = frames_per_ring(capacity, self._stack_size, horizon)
        num_rows = num_envs * capacity
        needed = frame_bytes_needed(fields, num_envs, capacity, horizon)
        check_room(needed, num_rows, folder, device)
        frame = Field("frame", stack.shape[1:], stack.dtype)
        self._frames = empty_column(frame, num_envs * self._num_frames, folder, device)
        self._frame_array = self._frames.numpy() if device == CPU else None
        self._frames_added_E = np.zeros(num_envs, np.int64)
        self._newest = np.zeros(num_rows, np.int64)
        """Index of the newest frame of a transition's observation; its successor's is the next."""
        self._before = np.zeros(num_rows, np.int16)
        """Number of earlier frames that belong to the observation."""
        self._first_E = np.zeros(num_envs, np.int64)
        """Number of each ring's first complete transition."""
        self._last_EW: npt.NDArray = np.zeros((num_envs, *stack.shape), stack.dtype)
        """Observation after the newest transition of each ring, on the host."""
        self._has_last_E = np.zeros(num_envs, np.bool_)
        self._last_before_E = np.zeros(num_envs, np.int64)
        """Number of earlier frames in the observation of each ring's newest transition."""
        self._other_fields = RingStorage(
            other_fields_of(fields), num_envs, capacity, folder, device
        )
        """Storage of all fields except observations."""
        self._other_fields.added_E = self.added_E
        self._other_fields.oldest_E = self.oldest_E

    @property
    def device(self) -> torch.device:
        """Device of the frames."""
        return self._frames.device

    @property
    def size_E(self) -> npt.NDArray[np.int64]:
        """Number of each ring's newest transitions whose frames are all stored."""
        return np.minimum(super().size_E, self.added_E - self._first_E)

    @property
    def guaranteed_size(self) -> int:
        """Number of transitions that a full ring stores for episodes of any length."""
        return min(self.capacity, self._num_frames // (self._stack_size + 1))

    @property
    def row_bytes(self) -> int:
        """Bytes of one transition in a file before compression."""
        stack = stack_of(self.fields)
        other_bytes = bytes_needed((*self._other_fields.fields, *FRAME_INDEX), 1)
        return stack.num_bytes // self._stack_size + other_bytes

    @property
    def layout(self) -> dict[str, Any]:
        """File layout, recorded in checkpoints."""
        return {"frames": self._num_frames}

    @property
    def column_names(self) -> tuple[str, ...]:
        """Names of the columns of a chunk file, in order."""
        return (*self._other_fields.column_names, *FRAME_COLUMNS)

    def restore_from(self, first_E: npt.NDArray[np.int64]) -> None:
        """Continue with the numbers ``first_E``, skipping the transitions before them."""
        is_gap_E = first_E > self.added_E
        self._first_E[is_gap_E] = first_E[is_gap_E]
        super().restore_from(first_E)

    def reward_sums(self) -> npt.NDArray[np.float64]:
        """Return the sum of the rewards in each ring, ``[E]``."""
        return self._other_fields.reward_sums(self.size_E)

    def add(self, env_N: npt.NDArray[np.int64], columns: Columns) -> None:
        """Append transitions, overwriting the oldest ones if a ring is full."""
        counts_E = np.bincount(env_N, minlength=self.num_envs)
        assert counts_E.max(initial=0) <= self.capacity, "more transitions than a ring holds"
        stack_NW = np.asarray(columns["observation"])
        successor_NW = np.asarray(columns["next_observation"])
        if not np.array_equal(stack_NW[:, 1:], successor_NW[:, :-1]):
            raise ConfigurationError(
                "a transition's successor does not continue the frame stack of its observation, so"
                " that frames cannot be deduplicated: stack the newest frame last, as"
                " mtrl_lightning.envs.Pixels does, or set EnvSpec.frame_stack to 0"
            )
        is_sorted = bool((env_N[1:] >= env_N[:-1]).all())
        order: Any = slice(None) if is_sorted else np.argsort(env_N, kind="stable")
        rows = self._rows(env_N[order], stack_NW[order], successor_NW[order])
        frames_E = np.bincount(rows.env_N, rows.num_frames_N, self.num_envs).astype(np.int64)
        if frames_E.max(initial=0) > self._num_frames:  # newer frames would overwrite these
            for half in np.array_split(np.arange(len(env_N)), 2):
                self.add(env_N[half], {name: column[half] for name, column in columns.items()})
            return
        self._write_rows(rows)
        self._frames_added_E += frames_E
        self._other_fields.add(env_N, columns)
        self._drop_incomplete()

    def _rows(
        self, env_N: npt.NDArray[np.int64], stack_NW: npt.NDArray, successor_NW: npt.NDArray
    ) -> _Rows:
        """Determine which frames of transitions, sorted by ring, are new."""
        is_first_N = np.ones(len(env_N), np.bool_)
        is_first_N[1:] = env_N[1:] != env_N[:-1]
        follows_N = np.zeros(len(env_N), np.bool_)
        within = np.flatnonzero(~is_first_N)
        follows_N[within] = _equal(stack_NW[within], successor_NW[within - 1])
        first = np.flatnonzero(is_first_N)
        env_F = env_N[first]
        is_everywhere = len(first) == len(env_N) == self.num_envs
        newest_FW = self._last_EW if is_everywhere else self._last_EW[env_F]
        first_stacks_FW = stack_NW if is_everywhere else stack_NW[first]
        follows_N[first] = self._has_last_E[env_F] & _equal(first_stacks_FW, newest_FW)
        before_N = np.zeros(len(env_N), np.int64)
        before_N[first] = self._last_before_E[env_F] + 1
        for row in np.flatnonzero(~follows_N).tolist():
            before_N[row] = _num_distinct(stack_NW[row]) - 1
        num_frames_N = np.where(follows_N, 1, before_N + 2)
        # in a sequence of consecutive transitions, each has one more earlier frame
        index_N = np.arange(len(env_N))
        run_N = np.maximum.accumulate(np.where(is_first_N | ~follows_N, index_N, 0))
        before_N = np.minimum(before_N[run_N] + index_N - run_N, self._stack_size - 1)
        return _Rows(env_N, stack_NW, successor_NW, is_first_N, follows_N, before_N, num_frames_N)

    def _write_rows(self, rows: _Rows) -> None:
        """Write the new frames of transitions, and the frame indices of each."""
        env_N = rows.env_N
        index_N = np.arange(len(env_N))
        first_N = np.maximum.accumulate(np.where(rows.is_first_N, index_N, 0))
        frames_N = np.cumsum(rows.num_frames_N)
        frames_before_N = (frames_N - rows.num_frames_N)[first_N]
        newest_N = self._frames_added_E[env_N] + frames_N - frames_before_N - 2
        self._write_frames(env_N, newest_N + 1, rows.successor_NW[:, -1])
        for row in np.flatnonzero(~rows.follows_N).tolist():
            before = int(rows.before_N[row])
            number_M = newest_N[row] - np.arange(before, -1, -1)
            begin_M = rows.stack_NW[row, self._stack_size - 1 - before :]
            self._write_frames(np.full(before + 1, env_N[row]), number_M, begin_M)
        number_N = self.added_E[env_N] + index_N - first_N
        row_N = self.rows_of(env_N, number_N)
        self._newest[row_N] = newest_N
        self._before[row_N] = rows.before_N
        last = np.flatnonzero(np.append(rows.is_first_N[1:], True)) if len(env_N) else index_N
        self._last_EW[env_N[last]] = rows.successor_NW[last]
        self._last_before_E[env_N[last]] = rows.before_N[last]
        self._has_last_E[env_N[last]] = True

    def _write_frames(
        self, env_M: npt.NDArray[np.int64], number_M: npt.NDArray[np.int64], frame_M: npt.NDArray
    ) -> None:
        row_M = self._frame_rows_of(env_M, number_M)
        if self._frame_array is not None:
            self._frame_array[row_M] = frame_M
        else:
            rows = to_device(row_M, self.device)
            self._frames[rows] = to_device(np.ascontiguousarray(frame_M), self.device)

    def _frame_rows_of(
        self, env_M: npt.NDArray[np.int64], number_M: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the row of each frame in the frames of all rings, by ring and number."""
        return env_M * self._num_frames + number_M % self._num_frames

    def _drop_incomplete(self) -> None:
        """Drop the oldest transitions with overwritten frames."""
        np.maximum(self._first_E, self.added_E - self.capacity, out=self._first_E)
        kept_from_E = self._frames_added_E - self._num_frames
        env_E = np.arange(self.num_envs)
        # Newest frames are in increasing order of transitions, and a transition's oldest frame is
        # less than one stack before its newest: only these transitions can have lost a frame.
        newest_E = self._newest[self.rows_of(env_E, self._first_E)]
        most_E = np.minimum(
            kept_from_E + self._stack_size - 1 - newest_E, self.added_E - self._first_E
        )
        number_EN = self._first_E[:, None] + np.arange(most_E.max(initial=0))
        is_lost_EN = self._oldest_frame(env_E[:, None], number_EN) < kept_from_E[:, None]
        self._first_E += (is_lost_EN & (number_EN < self.added_E[:, None])).sum(1)

    def _oldest_frame(
        self, env_N: npt.NDArray[np.int64], number_N: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        row_N = self.rows_of(env_N, number_N)
        return self._newest[row_N] - self._before[row_N]

    def take(self, env_N: Tensor, number_N: Tensor) -> dict[str, Tensor]:
        """Return copies of transitions by ring and number, on this storage's device.

        Observation and successor are views of one tensor, because they share all frames but one.
        """
        env = env_N.numpy()
        row_N = self.rows_of(env, number_N.numpy())
        # an observation and the next frame; frames before the first of an episode repeat it
        back_V = np.arange(self._stack_size, -1, -1)
        back_NV = np.minimum(back_V, self._before[row_N, None].astype(np.int64) + 1)
        frame_NV = self._newest[row_N, None] + 1 - back_NV
        index_NV = self._frame_rows_of(env[:, None], frame_NV)
        index = to_device(index_NV.reshape(-1), self.device)
        frames = self._frames.index_select(0, index)
        window_NV = frames.view(*index_NV.shape, *self._frames.shape[1:])
        columns = self._other_fields.take(env_N, number_N)
        columns["observation"] = window_NV[:, :-1]
        columns["next_observation"] = window_NV[:, 1:]
        return {field.name: columns[field.name] for field in self.fields}

    def to_columns(
        self, first_E: npt.NDArray[np.int64], end_E: npt.NDArray[np.int64]
    ) -> dict[str, npt.NDArray]:
        """Return the columns of a chunk file, with each frame of its transitions once.

        A file contains all frames of its transitions, so that it does not depend on other files.
        """
        columns = self._other_fields.to_columns(first_E, end_E)
        env_E = np.arange(self.num_envs)
        count_E = end_E - first_E
        first_frame_E = np.where(count_E > 0, self._oldest_frame(env_E, first_E), 0)
        last_frame_E = self._newest[self.rows_of(env_E, end_E - 1)] + 1
        num_frames_E = np.where(count_E > 0, last_frame_E - first_frame_E + 1, 0)
        env_N, number_N = enumerated(first_E, count_E)
        env_M, frame_M = enumerated(first_frame_E, num_frames_E)
        row_N = self.rows_of(env_N, number_N)
        index = to_device(self._frame_rows_of(env_M, frame_M), self.device)
        columns["newest"] = self._newest[row_N]
        columns["before"] = self._before[row_N]
        columns["first_frame"] = first_frame_E
        columns["num_frames"] = num_frames_E
        columns["frames"] = compressed(self._frames.index_select(0, index).cpu().numpy())
        return columns

    def from_columns(
        self,
        columns: Columns,
        first_E: npt.NDArray[np.int64],
        end_E: npt.NDArray[np.int64],
        ring_E: npt.NDArray[np.int64],
    ) -> None:
        """Append the columns of ``to_columns``; see ``Storage.from_columns``."""
        num_frames_E = np.asarray(columns["num_frames"])
        first_frame_E = np.asarray(columns["first_frame"])
        frame_shape = tuple(self._frames.shape[1:])
        frame_M = decompressed(columns["frames"], (int(num_frames_E.sum()), *frame_shape))
        here_N, number_N, is_kept_N = self._continue_in(first_E, end_E, ring_E)
        row_N = self.rows_of(here_N, number_N)
        self._newest[row_N] = columns["newest"][is_kept_N]
        self._before[row_N] = columns["before"][is_kept_N]
        env_M, frame_number_M = enumerated(first_frame_E, num_frames_E)
        is_kept_M = ring_E[env_M] >= 0
        kept: Any = slice(None) if is_kept_M.all() else is_kept_M
        self._write_frames(ring_E[env_M[kept]], frame_number_M[kept], frame_M[kept])
        is_filled_E = (ring_E >= 0) & (end_E > first_E)
        self._frames_added_E[ring_E[is_filled_E]] = (first_frame_E + num_frames_E)[is_filled_E]
        kept_columns = {name: columns[name][is_kept_N] for name in self._other_fields.column_names}
        self._other_fields.add(here_N, kept_columns)
        self._remember_last(ring_E[is_filled_E])
        self._drop_incomplete()

    def _remember_last(self, env_N: npt.NDArray[np.int64]) -> None:
        """Copy the observation after the newest transition of the given rings to the host."""
        number_N = self.added_E[env_N] - 1
        rows = self.take(torch.from_numpy(env_N), torch.from_numpy(number_N))
        self._last_EW[env_N] = rows["next_observation"].cpu().numpy()
        self._last_before_E[env_N] = self._before[self.rows_of(env_N, number_N)]
        self._has_last_E[env_N] = True


class _Rows(NamedTuple):
    """Transitions to add, sorted by ring."""

    env_N: npt.NDArray[np.int64]
    stack_NW: npt.NDArray
    successor_NW: npt.NDArray
    is_first_N: npt.NDArray[np.bool_]
    """Whether a transition is the first one to add to its ring."""
    follows_N: npt.NDArray[np.bool_]
    """Whether its observation is the successor of the previous transition in its ring."""
    before_N: npt.NDArray[np.int64]
    """Number of frames before the newest one in an observation."""
    num_frames_N: npt.NDArray[np.int64]
    """Number of its new frames, including that of its successor."""


def _equal(one_NW: npt.NDArray, other_NW: npt.NDArray) -> npt.NDArray[np.bool_]:
    """Return the mask of rows in which all numbers are equal."""
    return (one_NW == other_NW).all(tuple(range(1, one_NW.ndim)))


def _num_distinct(stack_W: npt.NDArray) -> int:
    """Return the number of frames of a stack without the repetitions of its first one."""
    is_new = [not np.array_equal(a, b) for a, b in pairwise(stack_W)]
    return len(stack_W) - is_new.index(True) if any(is_new) else 1
