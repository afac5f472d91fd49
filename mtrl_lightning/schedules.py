"""Schedules in environment steps, and the ratio of updates to vector steps."""

from __future__ import annotations

import math
from typing import Any

from mtrl_lightning.checks import above, at_least


class Every:
    """Schedule that is due at the first step at or past each multiple of ``interval``.

    Args:
        interval: interval in environment steps, at least 1.
        name: option that sets the interval, for the error message.
    """

    def __init__(self, interval: int, name: str = "interval") -> None:
        named: dict[str, Any] = {name: interval}
        at_least(1, hint=" environment step", **named)
        self.interval = interval
        self._last = 0

    def __call__(self, step: int) -> bool:
        """Return whether a multiple of the interval lies in ``(step of the last call, step]``."""
        is_due = step // self.interval > self._last // self.interval
        self._last = step
        return is_due

    def state_dict(self) -> dict[str, int]:
        """Return the step of the last call."""
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the step of the last call; the interval may differ from the saved run's."""
        self._last = state["last"]


class UpdateRatio:
    """Decide whether updates are due after vector steps.

    Args:
        ratio: updates per vector step, above 0; may be fractional.
        burst: updates due at the start (in mtrl, the number of warm-up steps).
    """

    def __init__(self, ratio: float, burst: int = 0) -> None:
        above(0, finite=True, updates_per_step=ratio, hint=", such as 1 or 0.5")
        at_least(0, warmup_updates=burst)
        self.ratio = ratio
        self.burst = burst
        self._start: tuple[int, int] | None = None

    def start(self, vector_steps: int, updates: int) -> None:
        """Start counting at the end of the warm-up; no effect if already started."""
        if self._start is None:
            self._start = (vector_steps, updates)

    def restart(self, vector_steps: int, updates: int) -> None:
        """Restart counting if it has started: no updates are due for earlier vector steps."""
        if self._start is not None:
            self._start = (vector_steps, updates - self.burst)

    @property
    def has_started(self) -> bool:
        """Whether counting has started, because the warm-up is over."""
        return self._start is not None

    def due(self, vector_steps: int, updates: int) -> bool:
        """Return whether at least one update is due."""
        assert self._start is not None, "call start() before due()"
        start_steps, start_updates = self._start
        steps = vector_steps - start_steps
        # 1e-6 compensates for the rounding of ratios such as 0.29
        num_owed = self.burst + math.floor(steps * self.ratio + 1e-6)
        return updates - start_updates < num_owed

    def state_dict(self) -> dict[str, Any]:
        """Return the ratio and the counts at the start, or an empty dictionary before it."""
        if self._start is None:
            return {}
        vector_steps, updates = self._start
        return {"vector_steps": vector_steps, "updates": updates, "ratio": self.ratio}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts at the start; the ratio may differ from the saved run's."""
        if not state:
            self._start = None
            return
        # updates may be negative after a reset of the networks, by up to the burst
        self._start = (state["vector_steps"], state["updates"])


def round_up(number: int) -> int:
    """Return the next round number: 1, 1.5, 2, 3, ... 9 times a power of ten."""
    power = 10 ** (len(str(number)) - 1)
    step = power // 2 if 10 <= number < 2 * power else power
    return math.ceil(number / step) * step
