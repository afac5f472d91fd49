"""Modifications of how training episodes are collected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import at_least, within
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.rollout.episodes import EpisodeWindows
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import Episode


class Extra:
    """Base of modifications of how training episodes are collected, for ``data.extras``."""

    stream: ClassVar[int] = 0
    """Distinguishes its random numbers from those of other extras."""

    def __str__(self) -> str:
        return type(self).__name__

    def check(self, spec: EnvSpec, window: int, envs_per_task: int) -> None:
        """Check that it can be used with these tasks.

        Args:
            spec: the tasks.
            window: number of finished episodes per task in this process' windows.
            envs_per_task: number of this process' environments per task.
        """

    def begin(self, spec: EnvSpec, task_E: npt.NDArray[np.int64]) -> None:
        """Prepare for environments of these tasks; called once by the ``Collector``."""

    def seed(self, seed: int) -> None:
        """Seed its random numbers."""

    def start_episodes(
        self,
        done_E: npt.NDArray[np.bool_],
        ended: Mapping[int, Episode],
        windows: EpisodeWindows,
    ) -> None:
        """Prepare for new episodes.

        Args:
            done_E: environments whose next step is the first of an episode.
            ended: finished episodes by environment.
            windows: windows over episodes in which the tasks' own policies acted.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, as plain values; see ``ActionTransform``."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; only called if the checkpoint has one."""


E = TypeVar("E", bound=Extra)


def extra_of(extras: Iterable[Extra], kind: type[E]) -> E | None:
    """Return the extra of a class; None if there is none."""
    return next((extra for extra in extras if isinstance(extra, kind)), None)


class StartMidway(Extra):
    """Start training episodes where an earlier one came near a success.

    ``rollout/repeated_steps`` counts the repeated steps, ``env_steps`` does not. See
    ``envs.vector.MidwayStarts``.

    Args:
        fraction: fraction of the episodes of a task that never succeeds, above 0 and at most 1; it
            decreases with success.
    """

    def __init__(self, fraction: float = 0.5) -> None:
        within(0, 1, above_low=True, fraction=fraction)
        self.fraction = fraction

    def __str__(self) -> str:
        return f"{type(self).__name__}, {self.fraction:g} of the episodes of an unsolved task"

    def check(self, spec: EnvSpec, window: int, envs_per_task: int) -> None:
        """Check that the tasks have a success signal or a largest return."""
        if not spec.has_score:
            raise ConfigurationError(
                "StartMidway needs tasks with a success signal or a largest return: remove it from"
                " data.extras"
            )


class EndAfterSuccess(Extra):
    """Truncate training episodes some steps after their first success.

    Args:
        steps: number of steps after the first success, at least 0.
    """

    def __init__(self, steps: int = 30) -> None:
        at_least(0, steps=steps)
        self.steps = steps

    def __str__(self) -> str:
        return f"{type(self).__name__}, {self.steps} steps"

    def check(self, spec: EnvSpec, window: int, envs_per_task: int) -> None:
        """Check that the tasks report success."""
        if not spec.has_success:
            raise ConfigurationError(
                "EndAfterSuccess needs tasks that report success: remove it from data.extras"
            )
