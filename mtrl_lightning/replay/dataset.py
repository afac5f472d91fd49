"""The stream of batches."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import IterableDataset

from mtrl_lightning.replay.buffer import ReplayBuffer
from mtrl_lightning.types import TransitionBatch

ENDLESS = 10**12
"""Length reported to Lightning, which fetches a dataset without length one batch too early."""


class ReplayDataset(IterableDataset[TransitionBatch]):
    """Draw batches from a replay buffer for ever, each when it is asked for.

    Args:
        buffer: what to draw from.
        batch_size: rows of a batch, over all tasks.
    """

    def __init__(self, buffer: ReplayBuffer, batch_size: int) -> None:
        self._buffer = buffer
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Return a number that is never reached."""
        return ENDLESS

    def __iter__(self) -> Iterator[TransitionBatch]:
        """Draw batches."""
        while True:
            with self._buffer.stopwatch.measure("sample"):
                batch = self._buffer.sample(self._batch_size)
            yield batch
