"""The reaction to an update whose gradient is not finite.

Shapes: ``R`` trained tasks.
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
"""Updates after which results are read even if no action is asked for, to bound their memory."""


class DivergenceGuard:
    """Stop at steps that were left out because their gradient is not finite, or count them.

    On a GPU the outcome of a step is kept there until ``read``, which is called when the device is
    waited for anyway.

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
        self._pending: list[tuple[str, int, Tensor]] = []

    def check(self, name: str, is_finite: bool | Tensor, loss_R: Tensor) -> None:
        """Note one step.

        Args:
            name: of the update, such as ``critic``.
            is_finite: whether the gradient was finite; a tensor if only the device knows.
            loss_R: the tasks' losses.

        Raises:
            DivergenceError: if the run has to end.
        """
        if isinstance(is_finite, Tensor):
            outcome = torch.cat([is_finite[None].to(loss_R.dtype), loss_R])
            self._pending.append((name, self._counters.updates, outcome))
            if len(self._pending) >= MAX_PENDING:
                self.read()
        elif not is_finite:
            self._report(name, self._counters.updates, loss_R.tolist())

    def read(self) -> None:
        """Read the outcomes that are still on the device, which is waited for.

        Raises:
            DivergenceError: if the run has to end.
        """
        if not self._pending:
            return
        pending = self._pending
        self._pending = []
        values = iter(torch.cat([outcome for _, _, outcome in pending]).tolist())
        for name, update, outcome in pending:
            is_finite, *losses = [next(values) for _ in range(len(outcome))]
            if not is_finite:
                self._report(name, update, losses)

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
