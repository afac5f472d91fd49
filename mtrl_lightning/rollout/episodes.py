"""Episodes: those that run, and windows over those that ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.types import Episode, StepResult

STATISTICS = ("return", "length", "success")


class RunningEpisodes:
    """Add up returns, lengths and successes, one episode per environment.

    Args:
        task_E: the task of each environment.
    """

    def __init__(self, task_E: npt.NDArray[np.int64]) -> None:
        self._task_E = task_E
        self.return_E = np.zeros(len(task_E))
        self.length_E = np.zeros(len(task_E), np.int64)
        self._success_E = np.zeros(len(task_E), np.bool_)

    def reset(self) -> None:
        """Forget all running episodes."""
        self._begin(np.ones(len(self._task_E), np.bool_))

    def add(self, result: StepResult) -> dict[int, Episode]:
        """Add a step; return the episodes that it ended, by environment.

        An episode in which a worker was restarted never counts as finished.
        """
        self.return_E += result.reward_E
        self.length_E += 1
        self._success_E |= result.success_E
        done_E = result.terminated_E | result.truncated_E | ~result.valid_E
        if not done_E.any():
            return {}
        ended = {
            int(e): Episode(
                task=int(self._task_E[e]),
                return_=float(self.return_E[e]),
                length=int(self.length_E[e]),
                success=bool(self._success_E[e]),
                success_last=bool(result.success_E[e]),
            )
            for e in np.flatnonzero(done_E & result.valid_E)
        }
        self._begin(done_E)
        return ended

    def _begin(self, which_E: npt.NDArray[np.bool_]) -> None:
        self.return_E[which_E] = 0
        self.length_E[which_E] = 0
        self._success_E[which_E] = False

    def state_dict(self) -> dict[str, list]:
        """Return the running sums as lists."""
        return {
            "return": self.return_E.tolist(),
            "length": self.length_E.tolist(),
            "success": self._success_E.tolist(),
        }

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Restore the running sums."""
        self.return_E[:] = state["return"]
        self.length_E[:] = state["length"]
        self._success_E[:] = state["success"]


class EpisodeWindows:
    """The last episodes of each task.

    Args:
        num_tasks: number of tasks, ``T``.
        size: number of last episodes kept per task.
    """

    def __init__(self, num_tasks: int, size: int) -> None:
        self._windows: list[deque[Episode]] = [deque(maxlen=size) for _ in range(num_tasks)]

    def add(self, episodes: Iterable[Episode]) -> None:
        """Remember episodes."""
        for episode in episodes:
            self._windows[episode.task].append(episode)

    def summary(self) -> dict[int, dict[str, dict[str, float]]]:
        """Return mean, min and max of return, length and success of each task with episodes.

        Returns:
            ``{task: {"return" | "length" | "success": {"mean", "min", "max"}}}``.
        """
        result: dict[int, dict[str, dict[str, float]]] = {}
        for task, window in enumerate(self._windows):
            if window:
                values = np.array([(e.return_, e.length, e.success) for e in window], np.float64)
                result[task] = {
                    name: {"mean": float(v.mean()), "min": float(v.min()), "max": float(v.max())}
                    for name, v in zip(STATISTICS, values.T, strict=True)
                }
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the windows as lists of plain values."""
        return {"windows": [[list(episode) for episode in window] for window in self._windows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the windows."""
        for window, rows in zip(self._windows, state["windows"], strict=True):
            window.clear()
            window.extend(Episode(*row) for row in rows)
