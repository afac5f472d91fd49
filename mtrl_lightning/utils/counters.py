"""The counters that all schedules use, and a stopwatch that measures the time of each phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Counters since the start of a run; all schedules use ``env_steps``."""

    env_steps: int = 0
    """Steps of single environments, regardless of action repeat; offline, updates."""
    vector_steps: int = 0
    """Steps of all environments together."""
    updates: int = 0
    """Gradient updates of the critic."""
    episodes: int = 0
    """Finished training episodes."""
    network_resets: int = 0
    """Resets of the networks."""
    worker_restarts: int = 0
    """Groups of environments rebuilt after a fault, in training and in evaluation."""
    dropped_transitions: int = 0
    """Steps of single environments that were dropped because of a fault."""
    repeated_steps: int = 0
    """Steps of single environments repeated by midway starts, not included in other counters."""
    skipped_updates: int = 0
    """Optimizer steps that were skipped because their gradient was not finite."""

    def state_dict(self) -> dict[str, int]:
        """Return the counters."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the counters."""
        vars(self).update({name: state[name] for name in vars(self)})


class Stopwatch:
    """Measure the seconds spent on named activities, which may overlap."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started_at: dict[str, float] = {}

    def start(self, name: str) -> None:
        """Start measuring an activity."""
        self._started_at[name] = time.perf_counter()

    def stop(self, name: str) -> None:
        """Add the time since ``start`` to the activity's seconds."""
        elapsed = time.perf_counter() - self._started_at.pop(name)
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure a ``with`` block."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def drain(self) -> dict[str, float]:
        """Return the seconds of each finished measurement since the last call, and reset them.

        Measurements that are still running count in full once they stop.
        """
        seconds = self._seconds
        self._seconds = {}
        return seconds
