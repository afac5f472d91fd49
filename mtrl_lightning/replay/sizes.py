"""Memory requirements of a replay, computed before it is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from mtrl_lightning.replay.frame_columns import FRAME_INDEX, other_fields_of, stack_of
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.spec import EnvSpec, Field


def replay_bytes(spec: EnvSpec, fields: Sequence[Field], num_envs: int, capacity: int) -> int:
    """Return the size of a benchmark's replay in bytes."""
    if spec.frame_stack:
        return frame_bytes_needed(fields, num_envs, capacity, spec.horizon)
    return bytes_needed(fields, num_envs * capacity)


def frames_per_ring(capacity: int, stack_size: int, horizon: int) -> int:
    """Return the number of frames of ``capacity`` transitions in episodes of ``horizon`` steps.

    Each episode has one more frame than steps. The oldest one, whose start may be overwritten,
    needs a full additional stack.
    """
    return capacity + -(-capacity // horizon) + stack_size


def frame_bytes_needed(fields: Sequence[Field], num_envs: int, capacity: int, horizon: int) -> int:
    """Return the size of a ``FrameStorage`` in bytes."""
    stack = stack_of(fields)
    num_frames = frames_per_ring(capacity, stack.shape[0], horizon)
    frame_bytes = stack.num_bytes // stack.shape[0]
    row_bytes = bytes_needed((*other_fields_of(fields), *FRAME_INDEX), 1)
    return num_envs * (num_frames * frame_bytes + capacity * row_bytes)
