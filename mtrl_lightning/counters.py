"""Named counts, which every schedule reads, and a stopwatch that says where the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields


@dataclass
class Counters:
    """What has happened since a run began; every schedule reads ``env_steps``."""

    env_steps: int = 0
    """Steps of single environments: one task stepping once is one."""
    vector_steps: int = 0
    """Steps of all environments together."""
    updates: int = 0
    """Gradient updates of the critic."""
    episodes: int = 0
    """Finished training episodes."""
    worker_restarts: int = 0
    """Groups of environments rebuilt after a fault, those of evaluations too."""
    dropped_transitions: int = 0
    """Steps of single environments that a fault made void."""
    skipped_updates: int = 0
    """Optimizer steps that were left out because their gradient was not finite."""

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the counts."""
        for field in fields(self):
            setattr(self, field.name, int(state[field.name]))


class Stopwatch:
    """Seconds spent on named things."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._begun: dict[str, float] = {}

    def start(self, name: str) -> None:
        """Begin to measure."""
        self._begun[name] = time.perf_counter()

    def stop(self, name: str) -> None:
        """Add the time since ``start``."""
        self._seconds[name] = (
            self._seconds.get(name, 0.0) + time.perf_counter() - self._begun.pop(name)
        )

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Measure a block."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def drain(self) -> dict[str, float]:
        """Return the seconds and begin anew."""
        seconds, self._seconds = self._seconds, {}
        return seconds
