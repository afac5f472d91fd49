"""The collector: steps a vector environment with a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.counters import Counters
from mtrl_lightning.envs.simulator import from_text, to_text
from mtrl_lightning.envs.vector import VectorEnv
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.rollout.episodes import EpisodeWindows, RunningEpisodes
from mtrl_lightning.types import Episode, Mode, Policy, Transitions


class Sample(NamedTuple):
    """What ``Collector.sample`` collected."""

    transitions: Transitions
    """All transitions, in the order of their steps."""
    episodes: list[Episode]
    """The episodes that ended meanwhile."""


class EpisodeListener:
    """Override the events you want; ``env`` is an environment's place in the vector."""

    def on_episode_created(self, env: int, task: int) -> None:
        """Called before the first observation of a new episode is there."""

    def on_episode_started(self, env: int, task: int, observation_D: npt.NDArray) -> None:
        """Called with an episode's first observation."""

    def on_episode_stepped(self, env: int, task: int, return_: float, length: int) -> None:
        """Called at every step, with the return and the length so far."""

    def on_episode_ended(self, env: int, episode: Episode) -> None:
        """Called when an episode has finished."""

    def on_sample_end(self, sample: Sample) -> None:
        """Called before ``Collector.sample`` returns."""


class Collector:
    """Act in a vector environment, record transitions and episodes, and count.

    Args:
        envs: the environments.
        policy: chooses the actions. Its ``act`` may return further fields of the transition beside
            them, ``(action_EA, {name: array [E, ...]})``.
        counters: counts that this collector advances; its own if None.
        window: finished episodes per task over which statistics are kept.
        listeners: called at the events of every episode; they make stepping slower.

    Raises:
        ConfigurationError: if the window is below 1.
    """

    def __init__(
        self,
        envs: VectorEnv,
        policy: Policy,
        *,
        counters: Counters | None = None,
        window: int = 50,
        listeners: Sequence[EpisodeListener] = (),
    ) -> None:
        if window < 1:
            raise ConfigurationError(f"window is {window}: give a number of episodes of at least 1")
        self.envs = envs
        self.policy = policy
        self.counters = Counters() if counters is None else counters
        self.windows = EpisodeWindows(envs.spec_.num_tasks, window)
        self.listeners = list(listeners)
        self._running = RunningEpisodes(envs.task_E)
        self._env_E = np.arange(envs.num_envs)
        self._observation_ED: npt.NDArray | None = None
        self._action_EA: npt.NDArray[np.float32] | None = None
        self._policy_columns: Mapping[str, npt.NDArray] = {}

    @property
    def has_started(self) -> bool:
        """Whether episodes are under way."""
        return self._observation_ED is not None

    def reset(self, seed: int | Sequence[int] | None = None) -> None:
        """Start a new episode in every environment; unfinished ones are dropped and not counted.

        Args:
            seed: of all that follows (see ``Benchmark``); None continues with the environments'
                own generators.
        """
        assert self._action_EA is None, "a step is under way"
        everywhere = range(self.envs.num_envs)
        self._notify(lambda listener, e, task: listener.on_episode_created(e, task), everywhere)
        self._running.reset()
        self._observation_ED, _ = self.envs.reset(seed=seed)
        self._notify_started(self._observation_ED, everywhere)

    def send(self, mode: Mode) -> None:
        """Choose actions and let the environments step; the first call resets them.

        Raises:
            PolicyFaultError: if an action is not finite.
        """
        assert self._action_EA is None, "a step is under way"
        if self._observation_ED is None:
            self.reset()
        assert self._observation_ED is not None
        # a copy, because this observation becomes part of the transition, and a policy may write
        # into what it is given (MetaWorld's scripted door-open policy does)
        chosen = self.policy.act(self._observation_ED.copy(), self.envs.task_E, mode)
        given_EA, self._policy_columns = chosen if isinstance(chosen, tuple) else (chosen, {})
        action_EA = np.array(given_EA, np.float32)
        self.envs.send(action_EA)
        self._action_EA = action_EA

    def receive(
        self, wanted_E: npt.NDArray[np.bool_] | None = None
    ) -> tuple[Transitions, dict[int, Episode]]:
        """Wait for the step that ``send`` started.

        Args:
            wanted_E: environments whose transitions are returned; None for all.

        Returns:
            The valid transitions, and the episodes that ended, by environment.
        """
        assert self._action_EA is not None, "send() comes first"
        assert self._observation_ED is not None
        observation_ED = self._observation_ED
        action_EA = self._action_EA
        self._action_EA = None
        result = self.envs.receive()
        self._observation_ED = result.observation_ED
        ended = self._running.add(result)
        self.windows.add(ended.values())
        kept_E = result.valid_E if wanted_E is None else result.valid_E & wanted_E
        kept = slice(None) if kept_E.all() else kept_E
        extra = {**result.extra, **self._policy_columns}
        transitions = Transitions(
            observation_ED[kept],
            action_EA[kept],
            result.reward_E[kept],
            result.next_observation_ED[kept],
            result.terminated_E[kept],
            result.truncated_E[kept],
            self.envs.task_E[kept],
            self._env_E[kept],
            {name: np.asarray(column)[kept] for name, column in extra.items()},
        )
        self.counters.vector_steps += 1
        self.counters.env_steps += int(result.valid_E.sum())
        self.counters.dropped_transitions += int((~result.valid_E).sum())
        self.counters.episodes += len(ended)
        if self.listeners:
            self._notify_step(
                ended,
                result.observation_ED,
                result.terminated_E | result.truncated_E | ~result.valid_E,
            )
        return transitions, ended

    def step(self, mode: Mode) -> tuple[Transitions, dict[int, Episode]]:
        """Send and receive."""
        self.send(mode)
        return self.receive()

    def sample(
        self,
        *,
        num_steps: int | None = None,
        num_episodes: int | None = None,
        mode: Mode = "explore",
        force_reset: bool = False,
        seed: int | Sequence[int] | None = None,
    ) -> Sample:
        """Collect a number of steps or of episodes.

        Args:
            num_steps: environment steps, rounded up to whole vector steps; episodes continue from
                call to call.
            num_episodes: episodes, shared out evenly among the environments, so that short ones are
                not preferred; each begins fresh, and steps beyond an environment's share are
                dropped.
            mode: how the policy acts.
            force_reset: begin new episodes also when collecting steps.
            seed: reset with this seed: the same seed gives the same episodes.

        Raises:
            ConfigurationError: unless exactly one of the two numbers is given, and is positive.
        """
        if (num_steps is None) == (num_episodes is None):
            raise ConfigurationError("give either num_steps or num_episodes")
        if (num_steps or num_episodes or 0) < 1:
            raise ConfigurationError("num_steps or num_episodes must be at least 1")
        if (
            force_reset
            or seed is not None
            or num_episodes is not None
            or self._observation_ED is None
        ):
            self.reset(seed)
        if num_episodes is None:
            assert num_steps is not None
            sample = self._steps(-(-num_steps // self.envs.num_envs), mode)
        else:
            sample = self._episodes(num_episodes, mode)
        for listener in self.listeners:
            listener.on_sample_end(sample)
        return sample

    def _steps(self, num_vector_steps: int, mode: Mode) -> Sample:
        parts: list[Transitions] = []
        episodes: list[Episode] = []
        for _ in range(num_vector_steps):
            transitions, ended = self.step(mode)
            parts.append(transitions)
            episodes += ended.values()
        return Sample(_concatenate(parts), episodes)

    def _episodes(self, num_episodes: int, mode: Mode) -> Sample:
        parts: list[Transitions] = []
        episodes: list[Episode] = []
        for transitions, ended in self.run_episodes(quotas(num_episodes, self.envs.num_envs), mode):
            parts.append(transitions)
            episodes += ended
        return Sample(_concatenate(parts), episodes)

    def run_episodes(
        self, quota_E: npt.NDArray[np.int64], mode: Mode
    ) -> Iterator[tuple[Transitions, list[Episode]]]:
        """Step until environment ``e`` has finished ``quota_E[e]`` episodes; yield each step's.

        Call ``reset`` before. What an environment does beyond its quota is left out.
        """
        left_E = quota_E.copy()
        while left_E.any():
            self.send(mode)
            transitions, ended = self.receive(wanted_E=left_E > 0)
            counted = {e: episode for e, episode in ended.items() if left_E[e]}
            left_E[list(counted)] -= 1
            yield transitions, list(counted.values())

    def _notify(
        self, call: Callable[[EpisodeListener, int, int], None], which: Sequence[int] | range
    ) -> None:
        for listener in self.listeners:
            for e in which:
                call(listener, int(e), int(self.envs.task_E[e]))

    def _notify_started(self, observation_ED: npt.NDArray, which: Sequence[int] | range) -> None:
        self._notify(
            lambda listener, e, task: listener.on_episode_started(e, task, observation_ED[e]), which
        )

    def _notify_step(
        self, ended: dict[int, Episode], observation_ED: npt.NDArray, done_E: npt.NDArray[np.bool_]
    ) -> None:
        def stepped(listener: EpisodeListener, e: int, task: int) -> None:
            if e in ended:
                return_ = ended[e].return_
                length = ended[e].length
            else:
                return_ = self._running.return_E[e]
                length = self._running.length_E[e]
            listener.on_episode_stepped(e, task, float(return_), int(length))

        self._notify(stepped, range(self.envs.num_envs))
        self._notify(lambda listener, e, _: listener.on_episode_ended(e, ended[e]), list(ended))
        new = np.flatnonzero(done_E).tolist()
        self._notify(lambda listener, e, task: listener.on_episode_created(e, task), new)
        self._notify_started(observation_ED, new)

    def state_dict(self) -> dict[str, Any]:
        """Return windows, running episodes and the environments' states, as plain values."""
        assert self._action_EA is None, "a step is under way"
        observation = None
        if self._observation_ED is not None:
            observation = [self._observation_ED.dtype.str, to_text(self._observation_ED)]
        return {
            "tasks": self.envs.task_E.tolist(),
            "windows": self.windows.state_dict(),
            "running": self._running.state_dict(),
            "observation": observation,
            "envs": self.envs.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them: the next step is that of the uninterrupted run.

        Raises:
            ConfigurationError: if the state is of other environments.
        """
        if state["tasks"] != self.envs.task_E.tolist():
            raise ConfigurationError(
                f"the checkpoint has environments of tasks {state['tasks']},"
                f" this run of {self.envs.task_E.tolist()}:"
                " continue with the same rollout.envs_per_task and data.exclude_from_training"
            )
        self.windows.load_state_dict(state["windows"])
        self._running.load_state_dict(state["running"])
        self.envs.set_state(state["envs"])
        self._observation_ED = None
        if state["observation"] is not None:
            dtype, text = state["observation"]
            shape = (self.envs.num_envs, *self.envs.single_observation_space.shape)  # type: ignore[misc]
            self._observation_ED = from_text(text, dtype).reshape(shape)


def quotas(total: int, num_envs: int) -> npt.NDArray[np.int64]:
    """Share ``total`` episodes out among environments as evenly as can be."""
    return np.array([total // num_envs + (e < total % num_envs) for e in range(num_envs)], np.int64)


def _concatenate(parts: list[Transitions]) -> Transitions:
    core = (np.concatenate(column) for column in zip(*(part[:-1] for part in parts), strict=True))
    extra = {name: np.concatenate([part.extra[name] for part in parts]) for name in parts[0].extra}
    return Transitions(*core, extra=extra)  # type: ignore[arg-type, misc]
