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
    """Running means of numbers; the device is not waited for until they are read.

    A value is a scalar tensor, or the numbers of all tasks, whose mean is taken at the end.

    Sums and counts are tensors of the device and stay the same ones, so that a CUDA graph of an
    update can add to them. With several processes, the means over all of them are read.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        """In single precision, exact up to 2^24 values; 0 for metrics without a value."""
        self._ones = {torch.device("cpu"): torch.tensor(1.0)}
        """The number 1 on each device, by which counts grow."""
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
        """Add the values of a block, an update, together: in one operation for all of them."""
        self._pending = {}
        try:
            yield
            self._add(self._pending)
        finally:
            self._pending = None

    def drain(self) -> dict[str, float]:
        """Return the means and clear them."""
        local = self._read()
        for sum_, count in zip(self._sums.values(), self._counts.values(), strict=True):
            sum_.fill_(NO_SUM)
            count.zero_()
        parts = distributed.gather(local)
        names = dict.fromkeys(name for part in parts for name in part)
        means = {}
        for name in names:
            sums, counts = zip(*(part[name] for part in parts if name in part), strict=True)
            means[name] = sum(sums) / sum(counts)
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return sums and counts."""
        local = self._read()
        return {
            "sums": {name: self._sums[name].clone() for name in local},
            "counts": {name: count for name, (_, count) in local.items()},
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
        if any(sum_.ndim > 1 or not sum_.numel() for sum_ in sums.values()):
            raise ValueError("a sum of metrics is neither a number nor one for each task")
        checked = {
            saved.text(name, "metric"): (sum_, saved.count(counts[name], name))
            for name, sum_ in sums.items()
        }
        for name in self._sums.keys() - checked.keys():
            self._sums[name].fill_(NO_SUM)
            self._counts[name].zero_()
        for name, (sum_, count) in checked.items():
            if name not in self._sums:
                self._accumulators(name, sum_)
            elif self._sums[name].shape != sum_.shape:
                sum_ = _mean(sum_)  # for all tasks, as checkpoints up to version 0.3 have it
            self._sums[name].copy_(sum_)
            self._counts[name].fill_(count)

    def _add(self, values: dict[str, Tensor]) -> None:
        if not values:
            return
        added = {name: value.detach().float().squeeze() for name, value in values.items()}
        ones = []
        for name, value in added.items():
            if value.ndim > 1 or not value.numel():
                shape = list(values[name].shape)
                raise ValueError(f"{name} has the shape {shape}: give a number, or one per task")
            self._accumulators(name, value)
            if value.device not in self._ones:
                self._ones[value.device] = torch.ones((), device=value.device)
            ones.append(self._ones[value.device])
        totals = [self._sums[name] for name in added] + [self._counts[name] for name in added]
        torch._foreach_add_(totals, [*added.values(), *ones])

    def _accumulators(self, name: str, value: Tensor) -> None:
        """Make a metric's sum and count where there are none of the value's shape and device."""
        known = self._sums.get(name)
        if known is None:
            self._sums[name] = torch.full_like(value, NO_SUM)
            self._counts[name] = torch.zeros((), device=value.device)
        elif (known.shape, known.device) != (value.shape, value.device):
            # checkpoints up to version 0.3 have one sum for all tasks
            self._sums[name] = _mean(known).to(value.device).expand(value.shape).clone()
            self._counts[name] = self._counts[name].to(value.device)

    def _read(self) -> dict[str, tuple[float, int]]:
        """Return each metric's sum and count, in one copy from the device."""
        tensors = [*self._sums.values(), *self._counts.values()]
        if not tensors:
            return {}
        device = tensors[-1].device
        numbers = torch.stack([_mean(tensor).to(device) for tensor in tensors]).tolist()
        sums, counts = numbers[: len(self._sums)], numbers[len(self._sums) :]
        return {
            name: (sum_, int(count))
            for name, sum_, count in zip(self._sums, sums, counts, strict=True)
            if count
        }


def _mean(sum_: Tensor) -> Tensor:
    """Return the mean over the tasks; a scalar stays as it is."""
    return sum_.mean() if sum_.ndim else sum_
