"""Listeners to the events of training episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        new = np.flatnonzero(builds_E > self._announced_builds_E).tolist()
        self._announced_builds_E = builds_E.copy()
        self._notify(lambda listener, e, task: listener.on_environment_created(e, task), new)

    def created(self, which: Sequence[int] | range) -> None:
        """Notify of new episodes, before their first observation is available."""
        self._notify(lambda listener, e, task: listener.on_episode_created(e, task), which)

    def started(self, observation_ED: npt.NDArray, which: Sequence[int] | range) -> None:
        """Notify of the first observations of new episodes."""
        self._notify(
            lambda listener, e, task: listener.on_episode_started(e, task, observation_ED[e]), which
        )

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

        def call_stepped(listener: EpisodeListener, e: int, task: int) -> None:
            if e in ended:
                return_ = ended[e].return_
                length = ended[e].length
            else:
                return_ = running.return_E[e]
                length = running.length_E[e]
            listener.on_episode_stepped(e, task, float(return_), int(length))

        self._notify(call_stepped, range(self._envs.num_envs))
        self._notify(lambda listener, e, _: listener.on_episode_ended(e, ended[e]), list(ended))
        new = np.flatnonzero(done_E).tolist()
        self.created(new)
        self.started(observation_ED, new)

    def _notify(
        self, call: Callable[[EpisodeListener, int, int], None], which: Sequence[int] | range
    ) -> None:
        for listener in self._listeners:
            for e in which:
                call(listener, int(e), int(self._envs.task_E[e]))
