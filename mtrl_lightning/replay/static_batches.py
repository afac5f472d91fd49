"""Batches in tensors that stay the same ones, for updates that a graph replays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch
from torch import Tensor
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
            self._ready.append(self._copied(batch, (index, shape)))
        return shapes

    def take(self, index: int) -> TransitionBatch:
        """Return a batch of those that were sampled last."""
        return self._ready[index]

    def random_generators(self) -> Sequence[torch.Generator]:
        """Return no generator: batches are sampled outside the graph."""
        return ()

    def _copied(self, batch: TransitionBatch, key: Hashable) -> TransitionBatch:
        """Copy a batch into the tensors that are kept for its place and shape."""
        if key not in self._kept:
            self._kept[key] = tree_map(partial(_new_copy, device=self._device), batch)
        kept = self._kept[key]
        for target, source in zip(tree_leaves(kept), tree_leaves(batch), strict=True):
            target.copy_(source, non_blocking=True)  # CUDA has read pageable memory on return
        return kept


def _new_copy(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
