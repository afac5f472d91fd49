"""When things happen, in environment steps."""

from __future__ import annotations

import math

from mtrl_lightning.errors import ConfigurationError


class Every:
    """True at the first step on or past each multiple of ``interval``.

    Args:
        interval: environment steps between two firings, at least 1.
        name: the option that set the interval, for the error message.

    Raises:
        ConfigurationError: if the interval is below 1.
    """

    def __init__(self, interval: int, name: str = "interval") -> None:
        if interval < 1:
            raise ConfigurationError(
                f"{name} is {interval}: give a number of environment steps of at least 1"
            )
        self.interval = interval
        self._last = 0

    def __call__(self, step: int) -> bool:
        """Return whether a multiple of the interval lies in ``(last step asked, step]``."""
        due = step // self.interval > self._last // self.interval
        self._last = step
        return due

    def state_dict(self) -> dict[str, int]:
        """Return the last step asked about."""
        return {"last": self._last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the last step asked about; the interval may have changed since."""
        self._last = int(state["last"])


class Until:
    """True while ``step < limit``, and never again once that was over.

    Args:
        limit: environment steps; 0 means never.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._over = False

    def __call__(self, step: int) -> bool:
        """Return whether the limit lies ahead."""
        self._over = self._over or step >= self.limit
        return not self._over

    def state_dict(self) -> dict[str, bool]:
        """Return whether the limit was reached."""
        return {"over": self._over}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """Restore whether the limit was reached, so that a warm-up is not repeated."""
        self._over = bool(state["over"])


class UpdateRatio:
    """How many updates are owed for the vector steps made.

    Args:
        ratio: updates a vector step, above 0, also fractional.
        burst: updates owed at the start (mtrl makes as many as it made warm-up steps).

    Raises:
        ConfigurationError: if the ratio is not above 0 or the burst is negative.
    """

    def __init__(self, ratio: float, burst: int = 0) -> None:
        if not ratio > 0 or not math.isfinite(ratio):
            raise ConfigurationError(
                f"updates_per_step is {ratio}: give a number above 0, such as 1 or 0.5"
            )
        if burst < 0:
            raise ConfigurationError(f"warmup_updates is {burst}: give 0 or more")
        self.ratio, self.burst = ratio, burst
        self._start: tuple[int, int] | None = None

    def start(self, vector_steps: int, updates: int) -> None:
        """Begin to count here, at the end of warm-up; without effect once begun."""
        if self._start is None:
            self._start = (vector_steps, updates)

    def restart(self, vector_steps: int, updates: int) -> None:
        """Begin to count here if counting had begun before: nothing is owed for what lies between."""
        if self._start is not None:
            self._start = (vector_steps, updates - self.burst)

    def due(self, vector_steps: int, updates: int) -> bool:
        """Return whether at least one update is owed."""
        assert self._start is not None, "start() comes first"
        steps, made = vector_steps - self._start[0], updates - self._start[1]
        return self.burst + math.floor(steps * self.ratio + 1e-6) > made

    def state_dict(self) -> dict[str, int]:
        """Return where counting began, empty before."""
        return (
            {}
            if self._start is None
            else {"vector_steps": self._start[0], "updates": self._start[1]}
        )

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore where counting began."""
        self._start = (int(state["vector_steps"]), int(state["updates"])) if state else None
