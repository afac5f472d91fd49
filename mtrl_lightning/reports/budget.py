"""How much of a program's time its reports may take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

MAX_SHARE = 0.01
"""Share of the time since the start that reports may take."""


class TimeBudget:
    """Measure what writing reports takes, and decide whether another one is affordable.

    Args:
        first_after: seconds before the first report, whose cost is not known.
    """

    def __init__(self, first_after: float = 0.0) -> None:
        self._first_after = first_after
        self._started_at = time.perf_counter()
        self._spent = 0.0
        self._longest = 0.0

    def allows(self) -> bool:
        """Return whether a report that takes as long as the longest one stays within the share."""
        elapsed = time.perf_counter() - self._started_at
        if elapsed < self._first_after:
            return False
        return self._spent + self._longest <= MAX_SHARE * elapsed

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the seconds of the block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._spent += seconds
            self._longest = max(self._longest, seconds)
