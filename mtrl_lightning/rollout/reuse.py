"""Episodes of unsolved tasks in which the policies of solved tasks act.

Shapes: ``T`` tasks, ``E`` environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import at_least, count, within
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks.share import Rules, Share
from mtrl_lightning.rollout.episodes import EpisodeWindows, check_scores, task_means
from mtrl_lightning.rollout.matching import own_shape
from mtrl_lightning.spec import EnvSpec


class PolicyReuse:
    """Let the policies of solved tasks act in some episodes of an unsolved task.

    What a task needs first, such as to grasp an object, another one may have learned already. In a
    part of its episodes the policy is therefore told that it is in another task, sampled from those
    that succeed, with the same sizes of observations and actions. (Fernández and Veloso 2006,
    "Probabilistic policy reuse in a reinforcement learning agent", where the other policy acts for
    a part of an episode.)

    An off-policy algorithm learns from these episodes as from others. An on-policy one cannot: it
    leaves out their steps, which count as environment steps all the same, and learns from them
    through ``rollout.midway_starts``, with which later episodes begin where these came near a
    success. These episodes are left out of success rates, so that ``PauseSolved`` and
    ``AdaptiveNoise`` do not count them; ``MidwayStarts``, which does not know whose policy acts,
    does. Episodes that began midway count as others.

    In the first environment of a task its own policy always acts, so that every task has something
    to learn from. In tasks without a success signal, the score takes the place of success: the
    return divided by the largest possible one.

    A ``Collector`` calls ``begin`` once, then ``start_episodes`` where episodes have ended.

    Args:
        fraction: of the episodes of a task that never succeeds, from 0 to 1; it falls with success.
        success: success rate up to which a task is unsolved, and from which on its policy acts in
            others, above 0 and at most 1.
        episodes: number of recent episodes of a task, in each process, for its success rate, at
            least 1; a task with fewer neither acts in others nor lets them act.
    """

    def __init__(self, fraction: float = 0.2, success: float = 0.5, episodes: int = 20) -> None:
        within(0, 1, fraction=fraction)
        within(0, 1, above_low=True, success=success)
        at_least(1, episodes=episodes)
        self._fraction = fraction
        self._success = success
        self._episodes = episodes
        self._generator = np.random.default_rng(0)

    def __str__(self) -> str:
        return (
            f"{type(self).__name__}, {self._fraction:g} of the episodes of a task below success"
            f" {self._success:g}"
        )

    def check(self, spec: EnvSpec, window: int, envs_per_task: int) -> None:
        """Check that it can be used with these tasks.

        Args:
            spec: the tasks.
            window: finished episodes that this process keeps of a task.
            envs_per_task: this process' environments of a task.
        """
        check_scores("rollout.reuse", spec, window, self._episodes)
        sizes = [_sizes(spec, task) for task in spec.train_tasks]
        if len(set(sizes)) == len(sizes):
            raise ConfigurationError(
                "rollout.reuse lets the policy of one task act in another, and no two tasks have"
                " observations and actions of the same sizes: leave it out"
            )
        if envs_per_task == 1:
            raise ConfigurationError(
                "rollout.reuse needs two environments of a task in each process, as in the first"
                " one the task's own policy always acts: raise rollout.envs_per_task, or leave it"
                " out"
            )

    def begin(self, spec: EnvSpec, task_E: npt.NDArray[np.int64]) -> None:
        """Begin in a number of environments, where at first every task's own policy acts."""
        self._spec = spec
        self._task_E = task_E
        self.acting_task_E = task_E
        """The task whose policy acts in each environment; not written into, but replaced."""
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

    def start_episodes(self, done_E: npt.NDArray[np.bool_], windows: EpisodeWindows) -> None:
        """Choose whose policy acts in each new episode.

        Args:
            done_E: environments whose next step is the first of an episode.
            windows: the episodes in which the tasks' own policies acted.
        """
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
            if solved and self._generator.random() < self._fraction * (1 - scores[own_task]):
                self.acting_task_E[env] = self._generator.choice(solved)

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
        """Return the tasks whose policies act, and the generator's state."""
        return {
            "tasks": self.acting_task_E.tolist(),
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; a new process of a run has no generator's state."""
        most = self._spec.num_tasks - 1
        tasks = [count(task, "tasks", most) for task in state["tasks"]]
        if len(tasks) != len(self._task_E):
            raise ValueError(f"tasks {tasks}")
        self.acting_task_E = np.array(tasks, np.int64)
        # another number of processes has other first environments
        self.acting_task_E[self._first_E] = self._task_E[self._first_E]
        if state["generator"] is not None:
            self._generator.bit_generator.state = state["generator"]

    @classmethod
    def reshard(cls, states: Sequence[Mapping[str, Any]], share: Share) -> dict[str, Any]:
        """Return the state of one process when a run continues with another number of them.

        Args:
            states: of all processes of the checkpoint.
            share: the rank, and the environments that it takes over.
        """
        rules: Rules = {"tasks": share.of_envs, "generator": share.own}
        return share.join("rollout.reuse", states, rules)


def _sizes(spec: EnvSpec, task: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a task's own observation and action."""
    name = spec.task_names[task]
    return tuple(own_shape(spec, kind, name) for kind in ("observation", "action"))
