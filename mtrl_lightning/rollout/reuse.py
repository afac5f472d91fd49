"""Reuse of the policies of solved tasks in episodes of unsolved tasks.

Shapes: ``T`` tasks, ``E`` environments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checkpoints import PER_ENV
from mtrl_lightning.checks import at_least, within
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.rollout.episodes import EpisodeWindows, check_scores, task_means
from mtrl_lightning.rollout.extras import Extra
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import Episode

FRACTION_OF_TRIALS = 0.1
"""Fraction of the episodes of a task that never succeeds in which any other policy is tried."""
NUM_RESULTS = 5
"""Number of episodes in a task from which another task's policy is assessed."""


class PolicyReuse(Extra):
    """Use the policies of solved tasks in some episodes of an unsolved task.

    Another task may already have learned a required skill, such as grasping an object. In some of
    its episodes, the policy is therefore conditioned on another task: a solved one with the same
    sizes of observations and actions. In a tenth of the episodes, any of these is tried, the least
    tried first; in the fraction ``fraction`` the best one so far acts if it performs better than
    the task's own policy: with a larger success rate or, if these are equal, a larger return,
    averaged over episodes that started with a reset. (Fernández and Veloso 2006, "Probabilistic
    policy reuse in a reinforcement learning agent", where the other policy acts for a part of an
    episode and is selected by a softmax of returns that includes the own one.)

    Off-policy algorithms learn from these episodes as from any others; ``PPO`` learns from steps
    that turned out better than their value. With ``StartMidway``, later episodes start where these
    came near a success. They are excluded from success rates and thus from ``PauseSolved``, but not
    from ``MidwayStarts``, which does not distinguish policies.

    In the first environment of a task, its own policy always acts, so that every task has
    transitions to learn from. Without a success signal, the score is used instead: the return
    divided by the largest possible one.

    Args:
        fraction: fraction of the episodes of a task that never succeeds, from 0 to 0.9, in which
            the best other policy acts; it decreases with success, as does the tenth in which any
            other acts. The first environment of a task is excluded.
        success: success rate below which a task is unsolved, and above which its policy acts in
            other tasks, above 0 and at most 1.
        episodes: number of a task's recent episodes per process, started with a reset, from which
            its success rate is computed, at least 1; a task with fewer is neither a source nor a
            target of reuse.
    """

    stream: ClassVar[int] = 1

    def __init__(self, fraction: float = 0.4, success: float = 0.5, episodes: int = 20) -> None:
        within(0, 1 - FRACTION_OF_TRIALS, fraction=fraction)
        within(0, 1, above_low=True, success=success)
        at_least(1, episodes=episodes)
        self._fraction = fraction
        self._success = success
        self._episodes = episodes
        self._generator = np.random.default_rng(0)

    def __str__(self) -> str:
        return (
            f"{type(self).__name__}, in a task below success {self._success:g} the best other"
            f" policy in {self._fraction:g} of its episodes, any in {FRACTION_OF_TRIALS:g}"
        )

    def check(self, spec: EnvSpec, window: int, envs_per_task: int) -> None:
        """Check that it can be used with these tasks."""
        check_scores("PolicyReuse", spec, window, self._episodes)
        sizes = [_sizes(spec, task) for task in spec.train_tasks]
        if len(set(sizes)) == len(sizes):
            raise ConfigurationError(
                "PolicyReuse uses the policy of one task in another, but no two tasks have the same"
                " sizes of observations and actions: remove it"
            )
        if envs_per_task == 1:
            raise ConfigurationError(
                "PolicyReuse needs two environments per task and process, because the task's own"
                " policy always acts in the first one: raise data.envs_per_task, or remove it"
            )

    def begin(self, spec: EnvSpec, task_E: npt.NDArray[np.int64]) -> None:
        """Use every environment's own task's policy."""
        self._spec = spec
        self._task_E = task_E
        self.acting_task_E = task_E
        """The task whose policy acts in each environment; replaced, never modified in place."""
        self._results: dict[tuple[int, int], deque[tuple[float, float]]] = {}
        """Success and return of the last episodes in a task with another task's policy, by both
        tasks."""
        self._sizes_T = [_sizes(spec, task) for task in range(spec.num_tasks)]
        self._first_E = np.unique(task_E, return_index=True)[1]
        """The first environment of each task."""

    def seed(self, seed: int) -> None:
        """Seed all choices."""
        self._generator = np.random.default_rng(seed)

    @property
    def is_foreign_E(self) -> npt.NDArray[np.bool_]:
        """Where the policy of another task acts."""
        return self.acting_task_E != self._task_E

    def end(self) -> None:
        """Use every task's own policy until new episodes start."""
        self.acting_task_E = self._task_E

    def start_episodes(
        self,
        done_E: npt.NDArray[np.bool_],
        ended: Mapping[int, Episode],
        windows: EpisodeWindows,
    ) -> None:
        """Choose whose policy acts in each new episode."""
        self._count(ended)
        self.acting_task_E = np.where(done_E, self._task_E, self.acting_task_E)
        scores = self._scores(windows)
        for env in np.setdiff1d(np.flatnonzero(done_E), self._first_E):
            own_task = int(self._task_E[env])
            if scores.get(own_task, 1.0) >= self._success:
                continue
            solved = [
                task
                for task, score in scores.items()
                if score >= self._success and self._sizes_T[task] == self._sizes_T[own_task]
            ]
            if solved:
                own_result = windows.recent_from_reset(own_task, self._episodes)
                failures = 1 - scores[own_task]
                self.acting_task_E[env] = self._choose(own_task, solved, own_result, failures)

    def _count(self, ended: Mapping[int, Episode]) -> None:
        """Record the results of episodes in which another policy acted."""
        for env, episode in ended.items():
            pair = int(self._task_E[env]), int(self.acting_task_E[env])
            # episodes that started midway do not show whether the policy gets there
            if pair[0] != pair[1] and not episode.midway:
                results = self._results.setdefault(pair, deque(maxlen=NUM_RESULTS))
                results.append((float(episode.success), episode.return_))

    def _mean_result(self, own_task: int, acting_task: int) -> tuple[float, float]:
        """Return the mean success and return of another task's policy."""
        success, return_ = np.mean(self._results[own_task, acting_task], axis=0)
        return float(success), float(return_)

    def _choose(
        self,
        own_task: int,
        solved: list[int],
        own_result: tuple[float, float] | None,
        failures: float,
    ) -> int:
        """Choose the task whose policy acts in a new episode of a task."""
        sampled = self._generator.random()
        if sampled < FRACTION_OF_TRIALS * failures:
            # the least tried one
            num_tried = {task: len(self._results.get((own_task, task), ())) for task in solved}
            fewest = min(num_tried.values())
            candidates = [task for task in solved if num_tried[task] == fewest]
            return int(self._generator.choice(candidates))
        tried = [task for task in solved if (own_task, task) in self._results]
        if tried and sampled < (FRACTION_OF_TRIALS + self._fraction) * failures:
            # compares returns if success rates are equal
            result, best = max((self._mean_result(own_task, task), task) for task in tried)
            if own_result is None or result > own_result:
                return best
        return own_task

    def _scores(self, windows: EpisodeWindows) -> dict[int, float]:
        """Return the recent mean score of each task with enough episodes."""
        scores = {}
        for task in np.unique(self._task_E).tolist():
            score = windows.recent_score(task, self._episodes, self._spec)
            if score is not None:
                scores[task] = score
        return scores

    def fractions(self) -> dict[int, float]:
        """Return the fraction of each task's environments in which another task's policy acts."""
        return task_means(self.is_foreign_E, self._task_E)

    def state_dict(self) -> dict[str, Any]:
        """Return the tasks whose policies act, their results, and the generator state."""
        return {
            PER_ENV: {"tasks": self.acting_task_E.tolist()},
            "results": [
                [*pair, [[*result] for result in results]]
                for pair, results in self._results.items()
            ],
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; new processes have no generator state."""
        self.acting_task_E = np.array(state[PER_ENV]["tasks"], np.int64)
        self._results = {
            (own, acting): deque(map(tuple, results), NUM_RESULTS)
            for own, acting, results in state.get("results", [])  # a new process has none
        }
        if "generator" in state:
            self._generator.bit_generator.state = state["generator"]


def _sizes(spec: EnvSpec, task: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a task's own observation and action."""
    return spec.shape_of("observation", task), spec.shape_of("action", task)
