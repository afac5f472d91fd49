"""Listeners to the events of training episodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mtrl_lightning.envs.vector.vector import VectorEnv
    from mtrl_lightning.rollout.episodes import RunningEpisodes
    from mtrl_lightning.rollout.sample import Sample
    from mtrl_lightning.transitions import Episode


class EpisodeListener:
    """Base class of listeners to the events of training episodes; override any of its methods.

    ``env`` is an environment's index in the vector. Override ``state_dict`` and ``load_state_dict``
    to save state in checkpoints. Each process has its own state. If a run is resumed with a
    different number of processes, lists with one entry per environment under the key ``per_env``
    move with the environments, and new processes have no other state.
    """

    def on_environment_created(self, env: int, task: int) -> None:
        """Called when an environment has been built: before its first episode, and when rebuilt.

        A resumed run builds all environments, then continues their episodes.
        """

    def on_episode_created(self, env: int, task: int) -> None:
        """Called before a new episode, whose first observation is not available yet."""

    def on_episode_started(self, env: int, task: int, observation_D: npt.NDArray) -> None:
        """Called with an episode's first observation."""

    def on_episode_stepped(self, env: int, task: int, return_: float, length: int) -> None:
        """Called after every step, with the return and the length so far."""

    def on_episode_ended(self, env: int, episode: Episode) -> None:
        """Called when an episode has finished."""

    def on_sample_end(self, sample: Sample) -> None:
        """Called before ``Collector.sample`` returns; not in training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; only called if the checkpoint has one."""


class EpisodeEvents:
    """Notify listeners of the events of a vector environment.

    Args:
        listeners: the listeners, called in order.
        envs: the environments.
    """

    def __init__(self, listeners: Sequence[EpisodeListener], envs: VectorEnv) -> None:
        self._listeners = listeners
        self._envs = envs
        self._announced_builds_E = np.zeros(envs.num_envs, np.int64)
        """Number of times each environment had been built at the last notification."""

    def built(self) -> None:
        """Notify of environments that were built since the last call."""
        if not self._listeners:
            return
        builds_E = self._envs.builds_E
        new = np.flatnonzero(builds_E > self._announced_builds_E)
        self._announced_builds_E = builds_E.copy()
        for listener, e, task in self._each(new):
            listener.on_environment_created(e, task)

    def created(self, envs: Iterable[int]) -> None:
        """Notify of new episodes, before their first observation is available."""
        for listener, e, task in self._each(envs):
            listener.on_episode_created(e, task)

    def started(self, observation_ED: npt.NDArray, envs: Iterable[int]) -> None:
        """Notify of the first observations of new episodes."""
        for listener, e, task in self._each(envs):
            listener.on_episode_started(e, task, observation_ED[e])

    def stepped(
        self,
        running: RunningEpisodes,
        ended: Mapping[int, Episode],
        observation_ED: npt.NDArray,
        done_E: npt.NDArray[np.bool_],
    ) -> None:
        """Notify of a vector step, of finished episodes, and of new ones that follow them.

        Args:
            running: the running episodes, after the step.
            ended: the finished episodes by environment.
            observation_ED: observations for which the next actions are chosen.
            done_E: environments that start a new episode.
        """
        if not self._listeners:
            return
        self.built()
        for listener, e, task in self._each(range(self._envs.num_envs)):
            return_, length = float(running.return_E[e]), int(running.length_E[e])
            if e in ended:
                return_, length = ended[e].return_, ended[e].length
            listener.on_episode_stepped(e, task, return_, length)
        for listener, e, _ in self._each(ended):
            listener.on_episode_ended(e, ended[e])
        new = np.flatnonzero(done_E)
        self.created(new)
        self.started(observation_ED, new)

    def _each(self, envs: Iterable[int]) -> Iterator[tuple[EpisodeListener, int, int]]:
        """Yield every listener with each of some environments and its task."""
        for listener in self._listeners:
            for e in envs:
                yield listener, int(e), int(self._envs.task_E[e])
