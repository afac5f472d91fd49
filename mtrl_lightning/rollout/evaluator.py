"""Evaluation on the same test episodes every time."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import at_least
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, tasks_of
from mtrl_lightning.envs.vector.vector import VectorEnv
from mtrl_lightning.errors import (
    CallError,
    EnvironmentFaultError,
    RestartsExhaustedError,
)
from mtrl_lightning.rollout.collector import Collector
from mtrl_lightning.rollout.episodes import info_metrics, mean_info, with_mean
from mtrl_lightning.rollout.matching import matched_policy
from mtrl_lightning.rollout.sample import quotas
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import Episode, Policy
from mtrl_lightning.utils.devices import one_thread
from mtrl_lightning.utils.progress import progress_bar

WORST = (1, 5)
"""Numbers of worst tasks whose mean success is logged, if there are more tasks."""


class Evaluation(NamedTuple):
    """Results of one evaluation: one entry per task of the split, averaged over its episodes."""

    spec: EnvSpec
    split: str
    tasks: tuple[int, ...]
    """Indices of the split's tasks in the spec."""
    num_episodes: int
    """Number of test episodes per task."""
    success_T: npt.NDArray[np.float64]
    """Fraction of episodes with success in any step."""
    success_last_T: npt.NDArray[np.float64]
    """Fraction of episodes with success in the last step."""
    return_T: npt.NDArray[np.float64]
    """Mean return of each task."""
    info: Mapping[str, Mapping[int, float]] = {}
    """Means of the logged keys of ``info``, by name and task."""

    @property
    def task_names(self) -> list[str]:
        """Names of the split's tasks."""
        return [self.spec.task_names[task] for task in self.tasks]

    def values(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the measured values of every task, by name."""
        measured: dict[str, npt.NDArray[np.float64]] = {}
        if self.spec.has_success:
            measured |= {"success": self.success_T, "success_last": self.success_last_T}
        measured["return"] = self.return_T
        if self.spec.max_return is not None:
            measured["score"] = self.return_T / self.spec.max_return
        return measured

    def metrics(self) -> dict[str, float]:
        """Return success in any step and in the last step, return and score: mean and per task.

        They are called ``eval/success``, ``eval/success_last``, ``eval/return``, ``eval/score`` in
        the split ``eval``, and ``eval_<split>/...`` in others, and end with ``/<task>`` for single
        tasks. ``eval/success_worst_5`` is the mean success (in any step) of the 5 worst tasks, and
        ``eval/info/<key>`` the mean of a key of ``info`` over steps and episodes. Benchmarks
        without success have no success metrics, and those without a largest return no score.
        """
        prefix = metric_prefix(self.split)
        result: dict[str, float] = {}
        for name, value_T in self.values().items():
            values = dict(zip(self.tasks, value_T.tolist(), strict=True))
            result |= with_mean(f"{prefix}/{name}", values, self.spec.task_names)
        ascending_T = np.sort(self.success_T)
        for k in WORST if self.spec.has_success else ():
            if k < len(self.tasks):
                result[f"{prefix}/success_worst_{k}"] = float(ascending_T[:k].mean())
        return result | info_metrics(prefix, self.info, self.spec.task_names)

    def success_intervals(self) -> dict[str, tuple[float, float]]:
        """Return 95 % Wilson intervals of the success in any step, by metric name.

        For the mean, the episodes of all tasks form one sample. Empty without success.
        """
        if not self.spec.has_success:
            return {}
        name = f"{metric_prefix(self.split)}/success"
        successes_T = np.rint(self.success_T * self.num_episodes).astype(int).tolist()
        num_tasks = len(successes_T)
        intervals = {name: wilson_interval(sum(successes_T), num_tasks * self.num_episodes)}
        for task, successes in zip(self.task_names, successes_T, strict=True):
            intervals[f"{name}/{task}"] = wilson_interval(successes, self.num_episodes)
        return intervals


def wilson_interval(successes: int, num_episodes: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a success rate."""
    from scipy.stats import binomtest  # imported lazily because it takes a second

    interval = binomtest(successes, num_episodes).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def main_metric(spec: EnvSpec) -> str:
    """Return the main metric of a benchmark: success, otherwise score, otherwise return."""
    if spec.has_success:
        return "success"
    return "return" if spec.max_return is None else "score"


def metric_prefix(split: str) -> str:
    """Return the prefix of a split's metrics: ``eval``, ``eval_base``."""
    return "eval" if split == "eval" else f"eval_{split.removeprefix('eval_')}"


def metric_names(benchmark: Benchmark) -> list[str]:
    """Return the names of all metrics of an evaluation, averages first."""
    spec = benchmark.spec
    logged = [name for key in spec.info_keys for name in (key, f"{key}_last")]
    names: list[str] = []
    for split in benchmark.splits[1:]:
        tasks = tasks_of(benchmark, split)
        zero_T = np.zeros(len(tasks))
        info = {name: dict.fromkeys(tasks, 0.0) for name in logged}
        names += Evaluation(spec, split, tasks, 1, zero_T, zero_T, zero_T, info).metrics()
    return sorted(names, key=lambda name: name.count("/"))


class EvaluatedEpisode(NamedTuple):
    """A finished test episode, and when it ended."""

    step: int
    """Vector step of the evaluation in which it ended."""
    env: int
    """Global index of its environment."""
    episode: Episode
    checksum: int
    """Checksum of its first and last observation."""


class Evaluator:
    """Run test episodes ``0, 1, ..., N - 1`` of a split's tasks, with the deterministic policy.

    Environments are created in the first evaluation and kept. Evaluations do not use random
    generators of training.

    Args:
        benchmark: the tasks.
        num_episodes: test episodes per task, ``N``.
        split: split to evaluate.
        envs_per_task: environments per task; each runs a contiguous share of the episodes.
        num_workers: worker processes; see ``VectorEnv``.
        timeout: seconds to wait for a worker's response.
        max_restarts: number of times an evaluation is repeated with new environments after a fault
            of an environment or its worker, over all evaluations.
        on_restart: called with the reason of each restart.
        share: index of this process and number of processes that share the environments.
        progress: whether to show a progress bar of the steps on a terminal.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        *,
        num_episodes: int,
        split: str = "eval",
        envs_per_task: int = 1,
        num_workers: int | None = None,
        timeout: float = 300.0,
        max_restarts: int = 0,
        on_restart: Callable[[str], None] = lambda _: None,
        share: tuple[int, int] = (0, 1),
        progress: bool = False,
    ) -> None:
        at_least(1, num_episodes=num_episodes, envs_per_task=envs_per_task, prefix="evaluation.")
        self._benchmark = benchmark
        self._num_episodes = num_episodes
        self._split = split
        self._tasks = tasks_of(benchmark, split)
        self._envs_per_task = min(envs_per_task, num_episodes)
        self._num_workers = num_workers
        self._timeout = timeout
        self._max_restarts = max_restarts
        self._on_restart = on_restart
        self._progress = progress
        self.num_restarts = 0
        """Number of times an evaluation was repeated."""
        num_envs = len(self._tasks) * self._envs_per_task
        rank, num_processes = share
        self._indices = np.array_split(range(num_envs), num_processes)[rank]
        """Global indices of this process' environments."""
        self._warns = rank == 0
        """Whether the next evaluation warns of tasks whose episodes are all equal."""
        self._envs: VectorEnv | None = None

    def evaluate(self, policy: Policy, on_step: Callable[[], None] = lambda: None) -> Evaluation:
        """Run all test episodes.

        Args:
            policy: the policy, called with mode ``exploit``.
            on_step: called between two steps; may raise to end the evaluation.

        Raises:
            PolicyFaultError: if the policy's actions are not finite.
            RestartsExhaustedError: if environments failed too often.
        """
        return self.summarize(self.run(policy, on_step))

    def run(
        self, policy: Policy, on_step: Callable[[], None] = lambda: None
    ) -> list[EvaluatedEpisode]:
        """Run the test episodes of this process' environments; see ``evaluate``."""
        while True:
            try:
                with one_thread():
                    return self._run(policy, on_step)
            except CallError:  # new environments would raise it again
                raise
            except EnvironmentFaultError as fault:
                self.close()  # restart from the first episode, in new environments
                if self.num_restarts >= self._max_restarts:
                    raise RestartsExhaustedError(
                        f"{fault} (in an evaluation,"
                        f" after {self.num_restarts} restarts, the maximum)"
                    ) from fault
                self.num_restarts += 1
                self._on_restart(str(fault))

    def _run(self, policy: Policy, on_step: Callable[[], None]) -> list[EvaluatedEpisode]:
        indices = self._indices
        if not len(indices):
            return []
        num_tasks = len(self._tasks)
        # check before environments are started
        policy = matched_policy(policy, self._benchmark.spec, self._tasks)
        if self._envs is None:
            tasks = np.repeat(self._tasks, self._envs_per_task)[indices]
            self._envs = VectorEnv(
                self._benchmark,
                tasks.tolist(),
                self._split,
                num_workers=self._num_workers,
                timeout=self._timeout,
                indices=indices.tolist(),
            )
        # environment k of a task runs episodes first_k, ..., first_k + share_k - 1, and is seeded
        # with first_k: the episodes of a task are the same for any number of environments
        shares = quotas(self._num_episodes, self._envs_per_task)
        collector = Collector(self._envs, policy)
        seeds = np.tile(np.cumsum(shares) - shares, num_tasks)[indices]
        collector.reset(seed=seeds.tolist())
        assert collector.observation_ED is not None
        start_E = [zlib.crc32(row_D.tobytes()) for row_D in collector.observation_ED]
        quota_E = np.tile(shares, num_tasks)[indices]
        finished: list[EvaluatedEpisode] = []
        most_steps = int(quota_E.max()) * self._benchmark.horizon_of(self._split)
        with progress_bar(f"evaluating ({self._split})", most_steps, self._progress) as bar:
            for step, (rows, ended) in enumerate(collector.run_episodes(quota_E, "exploit")):
                on_step()
                for env, episode in ended.items():
                    last_D = rows.next_observation_ED[rows.env_E == env]
                    checksum = zlib.crc32(last_D.tobytes(), start_E[env])
                    finished.append(EvaluatedEpisode(step, int(indices[env]), episode, checksum))
                    start_E[env] = zlib.crc32(collector.observation_ED[env].tobytes())
                bar.update()
        return finished

    def summarize(self, finished: Iterable[EvaluatedEpisode]) -> Evaluation:
        """Summarize all test episodes, given in any order."""
        # sort as in a single process, because floating-point sums depend on the order
        finished = sorted(finished, key=lambda one: (one.step, one.env))
        per_task: dict[int, list[Episode]] = {task: [] for task in self._tasks}
        for one in finished:
            per_task[one.episode.task].append(one.episode)
        assert all(len(episodes) == self._num_episodes for episodes in per_task.values())
        self._warn_of_equal_episodes(finished)
        # means over a task's episodes: [T] of the split
        success, success_last, returns = (
            np.array(
                [
                    np.mean([getattr(episode, field) for episode in episodes])
                    for episodes in per_task.values()
                ]
            )
            for field in ("success", "success_last", "return_")
        )
        return Evaluation(
            self._benchmark.spec,
            self._split,
            self._tasks,
            self._num_episodes,
            success,
            success_last,
            returns,
            mean_info(per_task),
        )

    def _warn_of_equal_episodes(self, finished: Sequence[EvaluatedEpisode]) -> None:
        """Warn once of tasks whose seeds have no effect, unless they have a single goal."""
        spec = self._benchmark.spec
        if not self._warns or self._num_episodes == 1 or spec.protocol.get("num_goals") == 1:
            return
        self._warns = False
        kinds: dict[int, set[tuple]] = {}
        for one in finished:
            kinds.setdefault(one.episode.task, set()).add((one.checksum, one.episode.return_))
        names = [spec.task_names[task] for task, of_task in kinds.items() if len(of_task) == 1]
        if names:
            warnings.warn(
                f"all {self._num_episodes} test episodes of {', '.join(names)} are equal, although"
                " their seeds differ. If reset(seed=...) should change them, call"
                " super().reset(seed=seed) in it, and sample from self.np_random. If the task is"
                " deterministic, ignore this, or set evaluation.num_episodes to 1",
                stacklevel=3,
            )

    def close(self) -> None:
        """Close the environments."""
        if self._envs is not None:
            self._envs.close()
            self._envs = None
