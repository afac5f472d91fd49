"""Batches in tensors that stay the same ones, for updates that a graph replays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch.utils._pytree import tree_leaves, tree_map

from mtrl_lightning.types import TransitionBatch


class StaticBatches:
    """Copies batches, sampled on the host or by the device, into tensors that stay the same ones.

    Args:
        sample: returns the next batch.
        device: of the tensors.
    """

    def __init__(self, sample: Callable[[], TransitionBatch], device: torch.device) -> None:
        self._sample = sample
        self._device = device
        self._kept: dict[Hashable, TransitionBatch] = {}
        self._ready: list[TransitionBatch] = []

    def prepare(self, num_updates: int) -> Sequence[Hashable]:
        """Sample batches and copy them; return the shapes of each."""
        self._ready = []
        shapes = []
        for index in range(num_updates):
            batch = self._sample()
            shape = tuple(tensor.shape for tensor in tree_leaves(batch))
            shapes.append(shape)
            if (index, shape) not in self._kept:
                self._kept[index, shape] = tree_map(
                    lambda t: torch.empty(t.shape, dtype=t.dtype, device=self._device), batch
                )
            kept = self._kept[index, shape]
            for target, source in zip(tree_leaves(kept), tree_leaves(batch), strict=True):
                target.copy_(source, non_blocking=True)  # CUDA has read pageable memory on return
            self._ready.append(kept)
        return shapes

    def take(self, index: int) -> TransitionBatch:
        """Return a batch of those that were sampled last."""
        return self._ready[index]

    def random_generators(self) -> Sequence[torch.Generator]:
        """Return no generator: batches are sampled outside the graph."""
        return ()
