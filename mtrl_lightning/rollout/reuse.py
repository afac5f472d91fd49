"""Episodes of unsolved tasks in which the policies of solved tasks act.

Shapes: ``T`` tasks, ``E`` environments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import at_least, within
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks.state import PER_ENV
from mtrl_lightning.rollout.episodes import EpisodeWindows, check_scores, task_means
from mtrl_lightning.rollout.extras import Extra
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import Episode

FRACTION_OF_TRIALS = 0.1
"""Of the episodes of a task that never succeeds: those in which any other policy is tried."""
NUM_RESULTS = 5
"""Episodes in a task with another one's policy by which that policy is judged."""


class PolicyReuse(Extra):
    """Let the policies of solved tasks act in some episodes of an unsolved task.

    What a task needs first, such as to grasp an object, another one may have learned already. In a
    part of its episodes the policy is therefore told that it is in another task, one of those that
    succeed, with the same sizes of observations and actions. Any of them is tried in a tenth of the
    episodes, those that have been tried least first; the one with the best results so far acts in
    ``fraction`` of them, as long as it does better than the task's own policy. Better is a larger
    success rate, and with the same one, such as 0, a larger return, on average over episodes that
    began with a reset. (Fernández and Veloso 2006, "Probabilistic policy reuse in a reinforcement
    learning agent", where the other policy acts for a part of an episode, and a softmax of returns
    chooses among it and the own one.)

    An off-policy algorithm learns from these episodes as from others, ``PPO`` from their steps that
    turned out better than its value. With ``StartMidway`` later episodes begin where
    these came near a success. These episodes are left out of success rates, so that ``PauseSolved``
    does not count them; ``MidwayStarts``, which does not know whose policy
    acts, does.

    In the first environment of a task its own policy always acts, so that every task has something
    to learn from. In tasks without a success signal, the score replaces success: the
    return divided by the largest possible one.

    A ``Collector`` calls ``begin`` once, then ``start_episodes`` where episodes have ended.

    Args:
        fraction: of the episodes of a task that never succeeds, from 0 to 0.9, in which the best
            other policy acts; it falls with success, as does the tenth in which any other acts. The
            first environment of a task takes no part.
        success: success rate up to which a task is unsolved, and from which on its policy acts in
            others, above 0 and at most 1.
        episodes: number of a task's recent episodes from a reset, in each process, for its success
            rate, at least 1; a task with fewer neither acts in others nor lets them act.
    """

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
        """Check that it can be used with these tasks.

        Args:
            spec: the tasks.
            window: finished episodes that this process keeps of a task.
            envs_per_task: this process' environments of a task.
        """
        check_scores("PolicyReuse", spec, window, self._episodes)
        sizes = [_sizes(spec, task) for task in spec.train_tasks]
        if len(set(sizes)) == len(sizes):
            raise ConfigurationError(
                "PolicyReuse lets the policy of one task act in another, and no two tasks have"
                " observations and actions of the same sizes: leave it out"
            )
        if envs_per_task == 1:
            raise ConfigurationError(
                "PolicyReuse needs two environments of a task in each process, as in the first"
                " one the task's own policy always acts: raise data.envs_per_task, or leave it"
                " out"
            )

    def begin(self, spec: EnvSpec, task_E: npt.NDArray[np.int64]) -> None:
        """Begin in a number of environments, where at first every task's own policy acts."""
        self._spec = spec
        self._task_E = task_E
        self.acting_task_E = task_E
        """The task whose policy acts in each environment; not written into, but replaced."""
        self._results: dict[tuple[int, int], deque[tuple[float, float]]] = {}
        """Success and return of the last episodes in a task with another one's policy, by the two
        tasks."""
        self._sizes_T = [_sizes(spec, task) for task in range(spec.num_tasks)]
        self._first_E = np.unique(task_E, return_index=True)[1]
        """The first environment of each task."""

    def seed(self, seed: int) -> None:
        """Seed all choices from here on."""
        self._generator = np.random.default_rng(seed)

    @property
    def is_foreign_E(self) -> npt.NDArray[np.bool_]:
        """Where the policy of another task acts."""
        return self.acting_task_E != self._task_E

    def end(self) -> None:
        """Let every task's own policy act until other episodes begin."""
        self.acting_task_E = self._task_E

    def start_episodes(
        self,
        done_E: npt.NDArray[np.bool_],
        ended: Mapping[int, Episode],
        windows: EpisodeWindows,
    ) -> None:
        """Choose whose policy acts in each new episode.

        Args:
            done_E: environments whose next step is the first of an episode.
            ended: episodes that have finished, by environment.
            windows: the episodes in which the tasks' own policies acted.
        """
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
        """Take the results of the episodes in which another policy acted."""
        for env, episode in ended.items():
            pair = int(self._task_E[env]), int(self.acting_task_E[env])
            # what comes from the middle says little about the way there
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
        """Return the task whose policy is to act in a new episode of a task."""
        sampled = self._generator.random()
        if sampled < FRACTION_OF_TRIALS * failures:
            # the one that has been tried least
            num_tried = {task: len(self._results.get((own_task, task), ())) for task in solved}
            fewest = min(num_tried.values())
            candidates = [task for task in solved if num_tried[task] == fewest]
            return int(self._generator.choice(candidates))
        tried = [task for task in solved if (own_task, task) in self._results]
        if tried and sampled < (FRACTION_OF_TRIALS + self._fraction) * failures:
            # the return decides where none succeeds
            result, best = max((self._mean_result(own_task, task), task) for task in tried)
            if own_result is None or result > own_result:
                return best
        return own_task

    def _scores(self, windows: EpisodeWindows) -> dict[int, float]:
        """Return the recent mean score of each task that has had enough episodes."""
        scores = {}
        for task in np.unique(self._task_E).tolist():
            score = windows.recent_score(task, self._episodes, self._spec)
            if score is not None:
                scores[task] = score
        return scores

    def fractions(self) -> dict[int, float]:
        """Return the fraction of each task's environments in which another's policy acts."""
        return task_means(self.is_foreign_E, self._task_E)

    def state_dict(self) -> dict[str, Any]:
        """Return the tasks whose policies act, their results, and the generator's state."""
        return {
            PER_ENV: {"tasks": self.acting_task_E.tolist()},
            "results": [
                [*pair, [[*result] for result in results]]
                for pair, results in self._results.items()
            ],
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; a new process of a run has no generator's state."""
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
