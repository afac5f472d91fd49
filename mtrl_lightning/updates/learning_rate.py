"""Schedules of the learning rates."""

from __future__ import annotations

from collections.abc import Sequence

from mtrl_lightning.checks import at_least
from mtrl_lightning.updates.update import Update


class LearningRate:
    """Schedule of a factor of every optimizer's learning rate."""

    def set(self, updates: Sequence[Update], progress: float) -> None:
        """Set the learning rates of all updates to the initial ones times the factor."""
        factor = self.factor(progress)
        for update in updates:
            assert update.optimizer is not None
            for group in update.optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
                group["lr"] = factor * group["initial_lr"]

    def factor(self, progress: float) -> float:
        """Return the factor.

        Args:
            progress: completed fraction of the run's environment steps (offline: updates), from 0
                to 1.
        """
        raise NotImplementedError


class LinearRate(LearningRate):
    """Anneal the factor linearly from 1 over the environment steps (offline: updates) of the run.

    Each iteration of an on-policy algorithm uses the factor at its start.

    Args:
        final: factor at the end of the run (``data.total_steps``), at least 0.
    """

    def __init__(self, final: float = 0.0) -> None:
        at_least(0, final=final)
        self._final = final

    def factor(self, progress: float) -> float:
        """Return a number between 1 and the final factor."""
        return 1 + (self._final - 1) * progress
