"""The reaction to an update whose gradient is not finite.

Shapes: ``R`` trained tasks, ``N`` updates, ``U`` steps of an update, ``L`` numbers of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from mtrl_lightning.checks import at_least, one_of
from mtrl_lightning.counters import Counters
from mtrl_lightning.errors import DivergenceError

OnNonfinite = Literal["stop", "skip"]
"""End the run, or leave the step out and count it."""
MAX_PENDING = 256
"""Updates after which outcomes are read even if nothing is logged or saved."""
SPARE_ROWS = 8
"""Updates that may be counted at once."""


class DivergenceGuard:
    """Stop at steps that were left out because their gradient is not finite, or count them.

    On a GPU the outcomes of the steps are kept there, in tensors that stay the same ones, until
    ``read``: when metrics are logged or a checkpoint is saved, which wait for the device anyway.

    Args:
        on_nonfinite: ``stop`` raises at the first such step, ``skip`` counts it.
        max_skipped: steps that may be skipped in a run, at least 0.
        task_names: of the trained tasks.
        counters: where skipped steps are counted.
        steps_envs: whether a message has the environment steps; an offline run makes none.
    """

    def __init__(
        self,
        on_nonfinite: OnNonfinite,
        max_skipped: int,
        task_names: Sequence[str],
        counters: Counters,
        *,
        steps_envs: bool = True,
    ) -> None:
        one_of(get_args(OnNonfinite), on_nonfinite=on_nonfinite)
        at_least(0, max_skipped_updates=max_skipped)
        self._on_nonfinite = on_nonfinite
        self._max_skipped = max_skipped
        self._task_names = list(task_names)
        self._counters = counters
        self._steps_envs = steps_envs
        self._names: list[str] = []
        """Updates whose outcomes a row has, in this order."""
        self._outcomes: dict[str, list[Tensor]] = {}
        """Of this update's steps: 1 for a step that was left out or 0, and the losses."""
        self._none: list[Tensor] = []
        """Outcome of a step that an update does not make."""
        self._rows: Tensor | None = None
        """Outcomes of the updates since ``read``, a row for each."""
        self._num_rows: Tensor | None = None
        """Number of these rows, on the device."""
        self._num_unread = 0
        """Updates since ``read``, as the host counts them."""

    def register(self, name: str) -> None:
        """Give the steps of an update a place in the rows."""
        self._names.append(name)

    def check(self, name: str, is_finite: bool, loss_R: Tensor) -> None:
        """Report one step whose outcome the host knows.

        Args:
            name: of the update, such as ``critic``.
            is_finite: whether the gradient was finite.
            loss_R: the tasks' losses.

        Raises:
            DivergenceError: if the run has to end.
        """
        if not is_finite:
            self._report(name, self._counters.updates, loss_R.tolist())

    def keep(self, name: str, found_inf: Tensor, loss_R: Tensor) -> None:
        """Keep the outcome of one step on the device until ``end_update`` and ``read``.

        Args:
            name: of the update.
            found_inf: 1 if the gradient was not finite and the step was left out, or 0.
            loss_R: the tasks' losses.
        """
        self._outcomes[name] = [found_inf.view(1), loss_R.detach()]

    def begin_update(self) -> None:
        """Drop the outcomes of an update that did not end, as where it could not be recorded."""
        self._outcomes = {}

    def end_update(self) -> None:
        """Write the outcomes of the update's steps into the next row."""
        if not self._outcomes and self._num_rows is None:
            return
        if self._num_rows is None or self._rows is None:
            some = torch.cat(next(iter(self._outcomes.values())))
            self._none = [torch.zeros_like(some)]
            self._rows = some.new_zeros(MAX_PENDING + SPARE_ROWS, len(self._names) * len(some))
            self._num_rows = torch.zeros(1, dtype=torch.int64, device=some.device)
        outcomes = [self._outcomes.get(name, self._none) for name in self._names]
        row = torch.cat([part for outcome in outcomes for part in outcome])
        self._rows.index_copy_(0, self._num_rows, row[None])
        self._num_rows += 1
        self._outcomes = {}

    def count_updates(self, number: int = 1) -> None:
        """Count updates that were made; read their outcomes where there are many.

        Args:
            number: of the updates that were made since the last call.

        Raises:
            DivergenceError: if the run has to end.
        """
        assert number <= SPARE_ROWS, "there is no room for their outcomes"
        self._num_unread += number
        if self._num_unread >= MAX_PENDING:
            self.read()

    def read(self) -> None:
        """Read the outcomes that are still on the device, which is waited for.

        Called between two updates, when the last one was counted.

        Raises:
            DivergenceError: if the run has to end.
        """
        self._num_unread = 0
        if self._num_rows is None or self._rows is None:
            return
        # one copy of both
        numbers = torch.cat([self._num_rows.to(self._rows.dtype), self._rows.flatten()]).cpu()
        self._num_rows.zero_()
        num_rows = int(numbers[0])
        outcome_NUL = numbers[1:].view(len(self._rows), len(self._names), -1)[:num_rows]
        first = self._counters.updates - num_rows
        for row, index in outcome_NUL[..., 0].nonzero().tolist():
            losses = outcome_NUL[row, index, 1:].tolist()
            self._report(self._names[index], first + row, losses)

    def _report(self, name: str, update: int, losses: Sequence[float]) -> None:
        cause = self._cause(name, losses)
        if self._on_nonfinite == "stop":
            after = f", after {self._counters.env_steps:,} env steps" if self._steps_envs else ""
            raise DivergenceError(
                f"{cause} in update {update + 1:,}{after};"
                " the step was not made, and the last checkpoint, if any, is from before it."
                " Continue from it, or start again, with a lower learning rate or max_grad_norm,"
                " or set model.init_args.on_nonfinite to skip to leave out such steps"
            )
        self._counters.skipped_updates += 1
        if self._counters.skipped_updates > self._max_skipped:
            raise DivergenceError(
                f"{cause} in update {update + 1:,}:"
                f" {self._counters.skipped_updates} updates were skipped"
                f" and model.init_args.max_skipped_updates is {self._max_skipped}."
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
