"""Listeners of training episodes, and when each of their methods is called."""

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
    """Base class of listeners to the events of training episodes; override those you need.

    ``env`` is an environment's index in the vector. A listener whose state is to be saved with the
    checkpoints overrides ``state_dict`` and ``load_state_dict``. Each process has its own state. In
    a run that continues with another number of processes, lists with one entry per environment
    under the key ``per_env`` move with the environments, and a new process has no other state.
    """

    def on_environment_created(self, env: int, task: int) -> None:
        """Called when an environment was built: before its first episode, and when it is rebuilt.

        A resumed run builds all of them, and then continues their episodes.
        """

    def on_episode_created(self, env: int, task: int) -> None:
        """Called before the first observation of a new episode is there."""

    def on_episode_started(self, env: int, task: int, observation_D: npt.NDArray) -> None:
        """Called with an episode's first observation."""

    def on_episode_stepped(self, env: int, task: int, return_: float, length: int) -> None:
        """Called at every step, with the return and the length so far."""

    def on_episode_ended(self, env: int, episode: Episode) -> None:
        """Called when an episode has finished."""

    def on_sample_end(self, sample: Sample) -> None:
        """Called before ``Collector.sample`` returns; not in training."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state for a checkpoint, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore its state; called only if the checkpoint has one."""


class EpisodeEvents:
    """Call listeners at the events of the environments of a vector.

    Args:
        listeners: to call, one after another.
        envs: the environments.
    """

    def __init__(self, listeners: Sequence[EpisodeListener], envs: VectorEnv) -> None:
        self._listeners = listeners
        self._envs = envs
        self._announced_builds_E = np.zeros(envs.num_envs, np.int64)
        """How often each environment was built when the listeners were called last."""

    def built(self) -> None:
        """Announce the environments that were built since the last call."""
        if not self._listeners:
            return
        builds_E = self._envs.builds_E
        new = np.flatnonzero(builds_E > self._announced_builds_E).tolist()
        self._announced_builds_E = builds_E.copy()
        self._notify(lambda listener, e, task: listener.on_environment_created(e, task), new)

    def created(self, which: Sequence[int] | range) -> None:
        """Announce new episodes, before their first observation is there."""
        self._notify(lambda listener, e, task: listener.on_episode_created(e, task), which)

    def started(self, observation_ED: npt.NDArray, which: Sequence[int] | range) -> None:
        """Announce the first observations of new episodes."""
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
        """Announce a vector step, the episodes that it ended, and the new ones after it.

        Args:
            running: the running episodes, after the step.
            ended: the episodes that ended, by environment.
            observation_ED: on which the next actions are chosen.
            done_E: environments that begin a new episode.
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
