"""Parts of a run that callbacks register with the ``Session``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class StepAction(NamedTuple):
    """Something that happens after a vector step and its updates, if it is due."""

    run: Callable[[int, bool], None]
    """Receives the environment steps made, and whether the run ends with them.

    With several processes it sets ``trainer.should_stop`` on all of them or on none.
    """
    at_start: Callable[[], None] = lambda: None
    """Called before the first environment step of a run."""


class Signals(Protocol):
    """Signals that ask the run to end."""

    @property
    def received_signal(self) -> int:
        """Number of the signal that this process has received; 0 for none."""

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal came; the run's state must be whole."""


class Checkpoints(Protocol):
    """The checkpoints of a run."""

    def save_interrupted(self) -> None:
        """Save a run that a signal or a fault ends."""


class ReplayFiles(Protocol):
    """The replay on disk, which is written with every checkpoint."""

    def prune(self, manifests: list[dict[str, Any]]) -> None:
        """Delete the files that none of the checkpoints needs."""
