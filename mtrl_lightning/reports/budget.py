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
        expected_seconds: that the first report is expected to take.
    """

    def __init__(self, expected_seconds: float = 0.0) -> None:
        self._started_at = time.perf_counter()
        self._spent = 0.0
        self._longest = expected_seconds

    def allows(self) -> bool:
        """Return whether a report that takes as long as the longest one stays within the share."""
        elapsed = time.perf_counter() - self._started_at
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
