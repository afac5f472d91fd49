"""Running episodes, windows over finished ones, and their durations."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checkpoints import PER_ENV
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import Episode, StepResult

STATISTICS = ("return", "length", "success")
OVER_TASKS: dict[str, Callable[[list[float]], Any]] = {
    "mean": np.mean,
    "min": min,
    "max": max,
    "std": statistics.fmean,
}
"""The logged statistics of an episode's values, and how the tasks' statistics are averaged."""


def task_means(value_E: npt.NDArray, task_E: npt.NDArray[np.int64]) -> dict[int, float]:
    """Return each task's mean over its environments."""
    return {int(task): float(np.mean(value_E[task_E == task])) for task in np.unique(task_E)}


def check_scores(option: str, spec: EnvSpec, window: int, number: int) -> None:
    """Check that an option can estimate the score of tasks from their recent episodes.

    Args:
        option: name of the option.
        spec: the tasks.
        window: number of finished episodes per task in this process' windows.
        number: number of episodes that the option uses.
    """
    if not spec.has_score:
        raise ConfigurationError(
            f"{option} needs to know which tasks are solved, but they have neither a success signal"
            " nor a largest return: remove it"
        )
    if window < number:
        raise ConfigurationError(
            f"{option} uses the success of {number} episodes, but data.window keeps only {window}"
            " in each process: give fewer episodes, or a larger window"
        )


class RunningEpisodes:
    """Accumulate returns, lengths, successes and ``info``, one episode per environment.

    Args:
        task_E: the task of each environment.
        info_keys: see ``EnvSpec``.
    """

    def __init__(self, task_E: npt.NDArray[np.int64], info_keys: Sequence[str] = ()) -> None:
        self._task_E = task_E
        self.return_E = np.zeros(len(task_E))
        self.length_E = np.zeros(len(task_E), np.int64)
        self._success_E = np.zeros(len(task_E), np.bool_)
        self._info = {key: _RunningMean(len(task_E)) for key in info_keys}

    def reset(self) -> None:
        """Discard all running episodes."""
        self._begin(np.ones(len(self._task_E), np.bool_))

    def add(self, result: StepResult) -> dict[int, Episode]:
        """Add a step; return the episodes that it ended, by environment.

        An episode in which a worker was restarted never counts as finished.
        """
        self.return_E += result.reward_E
        self.length_E += ~result.paused_E
        self._success_E |= result.success_E
        for key, mean in self._info.items():
            mean.add(result.info[key])
        done_E = result.done_E
        if not done_E.any():
            return {}
        ended = {
            int(e): Episode(
                task=int(self._task_E[e]),
                return_=float(self.return_E[e]),
                length=int(self.length_E[e]),
                success=bool(self._success_E[e]),
                success_last=bool(result.success_E[e]),
                env=int(e),
                info=self._info_of(int(e)),
                midway=bool(result.midway_E[e]),
            )
            for e in np.flatnonzero(done_E & result.valid_E)
        }
        self._begin(done_E)
        return ended

    def _info_of(self, e: int) -> dict[str, float]:
        """Return mean and last value of each key that an environment reported in its episode."""
        reported = {key: mean for key, mean in self._info.items() if mean.count_E[e]}
        means = {key: float(mean.sum_E[e] / mean.count_E[e]) for key, mean in reported.items()}
        return means | {f"{key}_last": float(mean.last_E[e]) for key, mean in reported.items()}

    def _begin(self, which_E: npt.NDArray[np.bool_]) -> None:
        self.return_E[which_E] = 0
        self.length_E[which_E] = 0
        self._success_E[which_E] = False
        for mean in self._info.values():
            mean.reset(which_E)

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums as lists."""
        sums = {
            "return": self.return_E.tolist(),
            "length": self.length_E.tolist(),
            "success": self._success_E.tolist(),
            "info": {key: mean.state_dict() for key, mean in self._info.items()},
        }
        return {PER_ENV: sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the running sums; missing keys of ``info`` start anew."""
        sums = state[PER_ENV]
        self.return_E[:] = sums["return"]
        self.length_E[:] = sums["length"]
        self._success_E[:] = sums["success"]
        for key, mean in self._info.items():
            mean.reset(np.ones(len(self._task_E), np.bool_))
            if key in sums["info"]:
                mean.load_state_dict(sums["info"][key])


class _RunningMean:
    """Sum, number and last of the values reported by each environment; NaN is no value."""

    def __init__(self, num_envs: int) -> None:
        self.sum_E = np.zeros(num_envs)
        self.count_E = np.zeros(num_envs, np.int64)
        self.last_E = np.zeros(num_envs)

    def add(self, value_E: npt.NDArray[np.float64]) -> None:
        is_reported_E = ~np.isnan(value_E)
        self.sum_E[is_reported_E] += value_E[is_reported_E]
        self.count_E += is_reported_E
        self.last_E[is_reported_E] = value_E[is_reported_E]

    def reset(self, which_E: npt.NDArray[np.bool_]) -> None:
        self.sum_E[which_E] = 0
        self.count_E[which_E] = 0
        self.last_E[which_E] = 0

    def state_dict(self) -> dict[str, list]:
        return {
            "sum": self.sum_E.tolist(),
            "count": self.count_E.tolist(),
            "last": self.last_E.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, list]) -> None:
        self.sum_E[:] = state["sum"]
        self.count_E[:] = state["count"]
        self.last_E[:] = state["last"]


class EpisodeWindows:
    """Sliding windows over the last episodes of each task, and episode counts.

    They are saved by environment, so that windows do not depend on the number of processes.

    Args:
        num_tasks: number of tasks, ``T``.
        size: number of episodes in each task's window.
    """

    def __init__(self, num_tasks: int, size: int) -> None:
        self.size = size
        self._windows: list[deque[Episode]] = [deque(maxlen=size) for _ in range(num_tasks)]
        self._of_envs: dict[int, deque[Episode]] = {}
        """The last episodes of each environment."""
        self._counts: Counter[int] = Counter()
        """Number of episodes of each environment since the start."""
        self._num_steps = 0
        """Number of vector steps since the start."""
        self.count_T = np.zeros(num_tasks, np.int64)
        """Number of episodes of each task since the start."""

    @classmethod
    def joined(
        cls, parts: Sequence[tuple[list[list[Episode]], npt.NDArray[np.int64]]], size: int
    ) -> EpisodeWindows:
        """Join the windows of all processes, given the results of ``of_tasks`` on each."""
        windows = cls(len(parts[0][1]), size)
        windows.count_T[:] = np.sum([count_T for _, count_T in parts], axis=0)
        for window, of_ranks in zip(
            windows._windows, zip(*(of_tasks for of_tasks, _ in parts), strict=True), strict=True
        ):
            episodes = [episode for of_rank in of_ranks for episode in of_rank]
            order = sorted(range(len(episodes)), key=lambda i: episodes[i].step)
            window.extend(episodes[i] for i in sorted(order[-size:]))
        return windows

    def of_tasks(self) -> tuple[list[list[Episode]], npt.NDArray[np.int64]]:
        """Return each task's last episodes, and its number of episodes since the start."""
        return [list(window) for window in self._windows], self.count_T

    def add(self, episodes: Iterable[Episode]) -> None:
        """Add the episodes that finished in a vector step; call this after every step."""
        self._num_steps += 1
        for finished in episodes:
            episode = finished._replace(step=self._num_steps)
            self._windows[episode.task].append(episode)
            self._of_envs.setdefault(episode.env, deque(maxlen=self.size)).append(episode)
            self._counts[episode.env] += 1
            self.count_T[episode.task] += 1

    def recent_score(self, task: int, number: int, spec: EnvSpec) -> float | None:
        """Return the mean score of a task's last episodes that started with a reset.

        It is the success rate or, without a success signal, the return divided by the largest
        possible one.

        Returns:
            The score, or None if there are fewer than ``number`` episodes.
        """
        episodes = self._from_reset(task)[-number:]
        if len(episodes) < number:
            return None
        return statistics.fmean(spec.score(one.return_, one.success) for one in episodes)

    def recent_from_reset(self, task: int, number: int) -> tuple[float, float] | None:
        """Return the mean success and return of the episodes of ``recent_score``, or None."""
        episodes = self._from_reset(task)[-number:]
        if not episodes:
            return None
        success = statistics.fmean(episode.success for episode in episodes)
        return success, statistics.fmean(episode.return_ for episode in episodes)

    def _from_reset(self, task: int) -> list[Episode]:
        """Return the episodes in a task's window that started with a reset."""
        return [episode for episode in self._windows[task] if not episode.midway]

    def summary(self) -> dict[int, dict[str, dict[str, float]]]:
        """Return statistics of return, length and success of each task with episodes.

        Returns:
            ``{task: {"return" | "length" | "success": {"mean", "min", "max", "std"}}}``; the
            standard deviation is that of the episodes in the window.
        """
        result: dict[int, dict[str, dict[str, float]]] = {}
        for task, window in enumerate(self._windows):
            if window:
                values = np.array([(e.return_, e.length, e.success) for e in window], np.float64)
                result[task] = {
                    name: {
                        "mean": float(v.mean()),
                        "min": float(v.min()),
                        "max": float(v.max()),
                        "std": float(v.std()),
                    }
                    for name, v in zip(STATISTICS, values.T, strict=True)
                }
        return result

    def success_from_reset(self) -> dict[int, float]:
        """Return each task's success rate over the episodes that started with a reset.

        Tasks without such episodes in their window are omitted.
        """
        episodes = {task: self._from_reset(task) for task in range(len(self._windows))}
        return {
            task: statistics.fmean(episode.success for episode in of_task)
            for task, of_task in episodes.items()
            if of_task
        }

    def info(self) -> dict[str, dict[int, float]]:
        """Return the means of ``info``: ``{name: {task: mean}}``."""
        return mean_info(dict(enumerate(self._windows)))

    def metrics(self, spec: EnvSpec) -> dict[str, float]:
        """Return the metrics of the episodes; empty before the first one has finished.

        They are called ``rollout/return``, ``rollout/length`` and, if the tasks report it,
        ``rollout/success`` for the means; ``rollout/return_min``, ``rollout/length_std`` and so on
        for the spreads of returns and lengths; ``rollout/info/<key>``. They end with ``/<task>``
        for single tasks. Over all tasks, the minimum and the maximum are taken of minima and
        maxima, and the mean of all others.
        """
        summary = self.summary()
        if not summary:
            return {}
        result: dict[str, float] = {}
        for name, kind in itertools.product(STATISTICS, OVER_TASKS):
            if name == "success" and not (spec.has_success and kind == "mean"):
                continue
            metric = f"rollout/{name}" if kind == "mean" else f"rollout/{name}_{kind}"
            values = {task: of_task[name][kind] for task, of_task in summary.items()}
            over_all = float(OVER_TASKS[kind](list(values.values())))
            result |= named(metric, over_all, values, spec.task_names)
        return result | info_metrics("rollout", self.info(), spec.task_names)

    def state_dict(self) -> dict[str, Any]:
        """Return the episodes by environment, as lists of plain values."""
        envs = range(max(self._of_envs, default=-1) + 1)
        episodes = [[list(episode) for episode in self._of_envs.get(env, ())] for env in envs]
        counts = [self._counts[env] for env in envs]
        return {"num_steps": self._num_steps, PER_ENV: {"episodes": episodes, "counts": counts}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._num_steps = state["num_steps"]
        self._of_envs = {
            env: deque((Episode(*row)._replace(env=env) for row in rows), self.size)
            for env, rows in enumerate(state[PER_ENV]["episodes"])
            if rows
        }
        self._counts = Counter({env: state[PER_ENV]["counts"][env] for env in self._of_envs})
        self.count_T[:] = 0
        for env, count in self._counts.items():
            self.count_T[self._of_envs[env][0].task] += count
        episodes = [episode for of_env in self._of_envs.values() for episode in of_env]
        for window in self._windows:
            window.clear()
        for episode in sorted(episodes, key=lambda one: (one.step, one.env)):
            self._windows[episode.task].append(episode)


class EpisodeTimes:
    """Wall-clock seconds of episodes, excluding episodes that span an interruption.

    Args:
        task_E: the task of each environment.
    """

    def __init__(self, task_E: npt.NDArray[np.int64]) -> None:
        self._task_E = task_E
        self._started_at_E = np.full(len(task_E), np.nan)
        self._seconds: dict[int, list[float]] = {}

    def start(self, which_E: npt.NDArray[np.bool_] | slice) -> None:
        """Start measuring the episodes of some environments."""
        self._started_at_E[which_E] = time.perf_counter()

    def forget(self) -> None:
        """Exclude the running episodes."""
        self._started_at_E[:] = np.nan

    def end(self, envs: Iterable[int]) -> None:
        """Add the seconds of the episodes that these environments have finished."""
        now = time.perf_counter()
        for e in envs:
            if not np.isnan(self._started_at_E[e]):
                seconds = now - float(self._started_at_E[e])
                self._seconds.setdefault(int(self._task_E[e]), []).append(seconds)

    def drain(self) -> dict[int, float]:
        """Return each task's mean over the episodes finished since the last call."""
        means = {task: float(np.mean(seconds)) for task, seconds in sorted(self._seconds.items())}
        self._seconds = {}
        return means


def mean_info(episodes: Mapping[int, Iterable[Episode]]) -> dict[str, dict[int, float]]:
    """Return the means of ``info``, by name and task.

    Args:
        episodes: episodes of each task; those without a key do not count for it.

    Returns:
        ``{name: {task: mean}}``.
    """
    values: dict[str, dict[int, list[float]]] = {}
    for task, of_task in episodes.items():
        for episode in of_task:
            for name, value in episode.info.items():
                values.setdefault(name, {}).setdefault(task, []).append(value)
    return {
        name: {task: float(np.mean(numbers)) for task, numbers in by_task.items()}
        for name, by_task in values.items()
    }


def info_metrics(
    prefix: str, means: Mapping[str, Mapping[int, float]], task_names: Sequence[str]
) -> dict[str, float]:
    """Return ``<prefix>/info/<key>`` and ``<prefix>/info/<key>_last``, averaged and per task."""
    result: dict[str, float] = {}
    for name, values in means.items():
        result |= with_mean(f"{prefix}/info/{name}", values, task_names)
    return result


def named(
    name: str, over_all: float, values: Mapping[int, float], task_names: Sequence[str]
) -> dict[str, float]:
    """Return ``{name: over_all, name/<task>: value, ...}``."""
    return {name: over_all} | {f"{name}/{task_names[t]}": value for t, value in values.items()}


def with_mean(
    name: str, values: Mapping[int, float], task_names: Sequence[str]
) -> dict[str, float]:
    """Return ``{name: mean over the tasks, name/<task>: value, ...}``."""
    return named(name, float(np.mean(list(values.values()))), values, task_names)
