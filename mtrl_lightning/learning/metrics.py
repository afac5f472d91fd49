"""Metrics since the last row that was logged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mtrl_lightning import saved
from mtrl_lightning.ranks import distributed

if TYPE_CHECKING:
    from mtrl_lightning.ranks.share import Share


class MeanMetrics:
    """Running means of scalar tensors; the device is not waited for until they are read.

    With several processes, the means over all of them are read.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: dict[str, Tensor]) -> None:
        """Add one value of each."""
        for name, value in values.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
            self._counts[name] = self._counts.get(name, 0) + 1

    def drain(self) -> dict[str, float]:
        """Return the means and clear them."""
        own = {name: (float(sum_), self._counts[name]) for name, sum_ in self._sums.items()}
        self._sums = {}
        self._counts = {}
        parts = distributed.gather(own)
        names = dict.fromkeys(name for part in parts for name in part)
        means = {}
        for name in names:
            sums, counts = zip(*(part[name] for part in parts if name in part), strict=True)
            means[name] = sum(sums) / sum(counts)
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return sums and counts."""
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

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
        self._sums = {saved.text(name, "metric"): sum_.float() for name, sum_ in sums.items()}
        self._counts = {name: saved.count(value, name) for name, value in counts.items()}
