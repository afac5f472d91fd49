"""Results of updates, which stay on the device until they are read, without synchronization.

``MeanMetrics`` averages metrics. ``DivergenceGuard`` counts the steps with a non-finite gradient
and ends the run if there are too many.

Shapes: ``R`` trained tasks, ``S`` optimizer steps, ``L`` numbers of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mtrl_lightning.checkpoints import ALL_RANKS
from mtrl_lightning.checks import at_least, one_of
from mtrl_lightning.errors import DivergenceError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.utils.counters import Counters

NO_SUM = -0.0
"""Initial value of a sum: starting from 0.0 would turn -0.0 into 0.0."""
OnNonfinite = Literal["stop", "skip"]
"""End the run, or skip the step and count it."""
MAX_PENDING = 1024
"""Number of steps after which outcomes are read even if nothing is logged or saved."""


class MeanMetrics:
    """Running means of metrics, which synchronize with the device only when they are read.

    A value is a scalar tensor, or one number per task, averaged over the tasks when read. With
    several processes, the means are those over all processes.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        """Counts in single precision, exact up to 2^24 values; 0 for metrics without a value."""
        self._ones = {torch.device("cpu"): torch.tensor(1.0)}
        """The number 1 on each device, the increment of the counts."""
        self._pending: dict[str, Tensor] | None = None
        """Values of the current update; None outside an update."""

    def add(self, values: dict[str, Tensor]) -> None:
        """Add one value of each metric.

        Within an update, values are accumulated at its end: do not modify them in place before.
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
        """Accumulate all values added in this context at its end, in one operation."""
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
        own = [
            (distributed.rank(), name, self._sums[name].clone(), count)
            for name, (_, count) in self._read().items()
        ]
        return {ALL_RANKS: {"sums": own}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore sums and counts; those of ranks that no longer exist are added to others."""
        for name in self._sums:
            self._sums[name].fill_(NO_SUM)
            self._counts[name].zero_()
        for rank, name, sum_, count in state[ALL_RANKS]["sums"]:
            if rank % distributed.world_size() == distributed.rank():
                self._accumulators(name, sum_)
                self._sums[name] += sum_
                self._counts[name] += count

    def _add(self, values: dict[str, Tensor]) -> None:
        if not values:
            return
        added = {name: value.detach().float().squeeze() for name, value in values.items()}
        ones = []
        for name, value in added.items():
            if value.ndim > 1 or not value.numel():
                shape = list(values[name].shape)
                raise ValueError(f"{name} has shape {shape}: expected a scalar or one per task")
            self._accumulators(name, value)
            if value.device not in self._ones:
                self._ones[value.device] = torch.ones((), device=value.device)
            ones.append(self._ones[value.device])
        totals = [self._sums[name] for name in added] + [self._counts[name] for name in added]
        torch._foreach_add_(totals, [*added.values(), *ones])

    def _accumulators(self, name: str, value: Tensor) -> None:
        """Create a metric's sum and count on the value's device if necessary."""
        known = self._sums.get(name)
        if known is None:
            self._sums[name] = torch.full_like(value, NO_SUM)
            self._counts[name] = torch.zeros((), device=value.device)
        elif known.device != value.device:  # loaded from a checkpoint
            self._sums[name] = known.to(value.device)
            self._counts[name] = self._counts[name].to(value.device)

    def _read(self) -> dict[str, tuple[float, int]]:
        """Return each metric's sum and count, in one copy from the device."""
        tensors = [*self._sums.values(), *self._counts.values()]
        if not tensors:
            return {}
        device = tensors[-1].device
        numbers = torch.stack([tensor.mean().to(device) for tensor in tensors]).tolist()
        sums, counts = numbers[: len(self._sums)], numbers[len(self._sums) :]
        return {
            name: (sum_, int(count))
            for name, sum_, count in zip(self._sums, sums, counts, strict=True)
            if count
        }


class _Outcome(NamedTuple):
    """The outcome of an optimizer step, on the device."""

    name: str
    """Name of the ``Update``."""
    update: int
    """Number of updates before this one."""
    numbers: Tensor
    """1 if the step was skipped, otherwise 0, and the tasks' losses, ``[1 + R]``."""


class DivergenceGuard:
    """Stop at steps that were skipped because of a non-finite gradient, or count them.

    On a GPU, the outcomes stay on the device until ``read`` is called: when metrics are logged or
    a checkpoint is saved, which synchronize anyway.

    Args:
        on_nonfinite: ``stop`` raises at the first such step, ``skip`` counts it.
        max_skipped: maximum number of skipped steps in a run, at least 0.
        task_names: names of the trained tasks.
        counters: counters that include skipped steps.
    """

    def __init__(
        self,
        on_nonfinite: OnNonfinite,
        max_skipped: int,
        task_names: Sequence[str],
        counters: Counters,
    ) -> None:
        one_of(get_args(OnNonfinite), on_nonfinite=on_nonfinite)
        at_least(0, max_skipped_updates=max_skipped)
        self._on_nonfinite = on_nonfinite
        self._max_skipped = max_skipped
        self._task_names = list(task_names)
        self._counters = counters
        self._pending: list[_Outcome] = []
        """Outcomes that are still on the device."""

    def check(self, name: str, is_finite: bool, loss_R: Tensor) -> None:
        """Report one step whose outcome is known on the host.

        Args:
            name: name of the update, such as ``critic``.
            is_finite: whether the gradient was finite.
            loss_R: the tasks' losses.

        Raises:
            DivergenceError: if it ends the run.
        """
        if not is_finite:
            self._report(name, self._counters.updates, loss_R.tolist())

    def keep(self, name: str, found_inf: Tensor, loss_R: Tensor) -> None:
        """Keep the outcome of one step on the device until ``read``.

        Args:
            name: name of the update.
            found_inf: 1 if the step was skipped because of a non-finite gradient, otherwise 0.
            loss_R: the tasks' losses.

        Raises:
            DivergenceError: if many outcomes are pending, and reading them ends the run.
        """
        numbers = torch.cat([found_inf.view(1), loss_R.detach()])
        self._pending.append(_Outcome(name, self._counters.updates, numbers))
        if len(self._pending) >= MAX_PENDING:
            self.read()

    def read(self) -> None:
        """Read the outcomes that are still on the device, synchronizing with it.

        Raises:
            DivergenceError: if one of them ends the run.
        """
        if not self._pending:
            return
        pending = self._pending
        self._pending = []
        number_SL = torch.stack([outcome.numbers for outcome in pending]).tolist()
        for outcome, (found_inf, *losses) in zip(pending, number_SL, strict=True):
            if found_inf:
                self._report(outcome.name, outcome.update, losses)

    def _report(self, name: str, update: int, losses: Sequence[float]) -> None:
        cause = self._cause(name, losses)
        if self._on_nonfinite == "stop":
            raise DivergenceError(
                f"{cause} in update {update + 1:,}:"
                " the step was not applied, and the last checkpoint, if any, is from before it."
                " Resume from it or restart with a lower learning rate or max_grad_norm,"
                " or set model.init_args.on_nonfinite to skip to skip such steps"
            )
        self._counters.skipped_updates += 1
        if self._counters.skipped_updates > self._max_skipped:
            raise DivergenceError(
                f"{cause} in update {update + 1:,}:"
                f" {self._counters.skipped_updates} updates were skipped,"
                f" but model.init_args.max_skipped_updates is {self._max_skipped}."
                " Lower the learning rate, or raise max_skipped_updates"
            )

    def _cause(self, name: str, losses: Sequence[float]) -> str:
        wrong = [
            f"{task} ({loss})"
            for task, loss in zip(self._task_names, losses, strict=False)
            if not math.isfinite(loss)
        ]
        if wrong:
            return f"the {name} loss is not finite for {', '.join(wrong)}"
        return f"the gradient of the {name} loss is not finite, though every task's loss is"
