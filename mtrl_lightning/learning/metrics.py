"""Metrics since the last row that was logged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtrl_lightning import saved
from mtrl_lightning.ranks import distributed

if TYPE_CHECKING:
    from mtrl_lightning.ranks.share import Share

NO_SUM = -0.0
"""Sum of no values: a sum from 0.0 would turn -0.0 into 0.0."""


class MeanMetrics:
    """Running means of scalar tensors; the device is not waited for until they are read.

    Sums and counts are tensors of the device and stay the same ones, so that a CUDA graph of an
    update can add to them. With several processes, the means over all of them are read.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        """In single precision, exact up to 2^24 values; 0 for metrics without a value."""
        self._pending: dict[str, Tensor] | None = None
        """Values of the update under way; None outside one."""

    def add(self, values: dict[str, Tensor]) -> None:
        """Add one value of each.

        In an update they are all added at its end: a value must not change in place until then.
        """
        if self._pending is None:
            self._add(values)
            return
        if any(name in self._pending for name in values):
            self._add(self._pending)
            self._pending.clear()
        self._pending |= {name: value.detach() for name, value in values.items()}

    @contextmanager
    def added_at_end(self) -> Iterator[None]:
        """Add the values of a block, an update, together: in two operations for all of them."""
        self._pending = {}
        try:
            yield
            self._add(self._pending)
        finally:
            self._pending = None

    def drain(self) -> dict[str, float]:
        """Return the means and clear them."""
        own = self._read()
        for sum_, count in zip(self._sums.values(), self._counts.values(), strict=True):
            sum_.fill_(NO_SUM)
            count.zero_()
        parts = distributed.gather(own)
        names = dict.fromkeys(name for part in parts for name in part)
        means = {}
        for name in names:
            sums, counts = zip(*(part[name] for part in parts if name in part), strict=True)
            means[name] = sum(sums) / sum(counts)
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return sums and counts."""
        own = self._read()
        return {
            "sums": {name: self._sums[name].clone() for name in own},
            "counts": {name: count for name, (_, count) in own.items()},
        }

    @staticmethod
    def reshard(states: Sequence[dict[str, Any]], share: Share) -> dict[str, Any]:
        """Return the state of a rank; the first one has the sums and counts of all."""
        sums: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for state in states if share.rank == 0 else ():
            for name, value in state["sums"].items():
                sums[name] = sums.get(name, 0) + value
                counts[name] = counts.get(name, 0) + state["counts"][name]
        return {"sums": sums, "counts": counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore sums and counts."""
        sums, counts = state["sums"], state["counts"]
        if sums.keys() != counts.keys() or not all(counts.values()):
            raise ValueError("metrics without a sum or a count")
        if any(sum_.ndim for sum_ in sums.values()):
            raise ValueError("a sum of metrics is no single number")
        checked = {
            saved.text(name, "metric"): (sum_, saved.count(counts[name], name))
            for name, sum_ in sums.items()
        }
        for name in self._sums.keys() - checked.keys():
            self._sums[name].fill_(NO_SUM)
            self._counts[name].zero_()
        for name, (sum_, count) in checked.items():
            if name not in self._sums:
                self._accumulators(name, sum_.device)
            self._sums[name].copy_(sum_)
            self._counts[name].fill_(count)

    def _add(self, values: dict[str, Tensor]) -> None:
        if not values:
            return
        for name, value in values.items():
            self._accumulators(name, value.device)
        added = [value.detach().float().reshape(()) for value in values.values()]
        torch._foreach_add_([self._sums[name] for name in values], added)
        torch._foreach_add_([self._counts[name] for name in values], 1)

    def _accumulators(self, name: str, device: torch.device) -> None:
        """Make a metric's sum and count where there are none on the device."""
        if name in self._sums and self._sums[name].device == device:
            return
        new = name not in self._sums
        sum_ = torch.tensor(NO_SUM) if new else self._sums[name]
        count = torch.tensor(0.0) if new else self._counts[name]
        self._sums[name] = sum_.to(device)
        self._counts[name] = count.to(device)

    def _read(self) -> dict[str, tuple[float, int]]:
        """Return each metric's sum and count, in one copy from the device."""
        tensors = [*self._sums.values(), *self._counts.values()]
        if not tensors:
            return {}
        device = tensors[-1].device
        numbers = torch.stack([tensor.to(device) for tensor in tensors]).tolist()
        sums, counts = numbers[: len(self._sums)], numbers[len(self._sums) :]
        return {
            name: (sum_, int(count))
            for name, sum_, count in zip(self._sums, sums, counts, strict=True)
            if count
        }
