"""The collector: steps a vector environment with a policy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.rollout import collector_state
from mtrl_lightning.rollout.action_transforms import ActionTransform, sent_actions
from mtrl_lightning.rollout.episodes import (
    EpisodeTimes,
    EpisodeWindows,
    RunningEpisodes,
    task_means,
)
from mtrl_lightning.rollout.exploration import CorrelatedNoise
from mtrl_lightning.rollout.extras import Extra, extra_of
from mtrl_lightning.rollout.listeners import EpisodeEvents, EpisodeListener
from mtrl_lightning.rollout.matching import matched_policy
from mtrl_lightning.rollout.pausing import PauseSolved
from mtrl_lightning.rollout.reuse import PolicyReuse
from mtrl_lightning.rollout.sample import Sample, concatenated, quotas
from mtrl_lightning.transitions import (
    Episode,
    Mode,
    Policy,
    SeededPolicy,
    Transitions,
    WeightedPolicy,
)
from mtrl_lightning.utils.counters import Counters

if TYPE_CHECKING:
    from mtrl_lightning.envs.vector.vector import VectorEnv

EQUAL_ENDS = 10
"""Number of episodes that terminate at the same length before a time limit is suspected."""


class Collector:
    """Step a vector environment with a policy, and collect transitions and episodes.

    Args:
        envs: the environments.
        policy: the policy. Its ``act`` may return further fields of the transition in addition to
            actions, ``(action_EA, {name: array [E, ...]})``. If it has task names, as all
            algorithms and loaded policies do, tasks are matched by name: see ``matched_policy``.
        counters: counters to advance; None for its own.
        window: number of finished episodes per task over which statistics are computed.
        listeners: called on the events of every episode; they make stepping slower.
        action_transforms: transforms of the actions sent to the environments, applied in order. The
            transitions contain the policy's original actions.
        extras: modify how episodes are collected: ``CorrelatedNoise`` explores instead of the
            policy, ``PauseSolved`` determines which environments ``choose_paused`` pauses, and with
            ``PolicyReuse`` transitions have a further field, ``foreign``.
    """

    def __init__(
        self,
        envs: VectorEnv,
        policy: Policy,
        *,
        counters: Counters | None = None,
        window: int = 50,
        listeners: Sequence[EpisodeListener] = (),
        action_transforms: Sequence[ActionTransform] = (),
        extras: Sequence[Extra] = (),
    ) -> None:
        at_least(1, window=window)
        self.envs = envs
        self.policy = policy
        self.counters = Counters() if counters is None else counters
        self.windows = EpisodeWindows(envs.spec_.num_tasks, window)
        self.listeners = list(listeners)
        self.action_transforms = list(action_transforms)
        self.extras = list(extras)
        for extra in self.extras:
            extra.begin(envs.spec_, envs.task_E)
        self._exploration = extra_of(extras, CorrelatedNoise)
        self._pausing = extra_of(extras, PauseSolved)
        self._reuse = extra_of(extras, PolicyReuse)
        self.paused_E = np.zeros(envs.num_envs, np.bool_)
        """Environments that are currently not stepped; none after ``reset``."""
        self.dropped_E = np.zeros(envs.num_envs, np.bool_)
        """Environments that were rebuilt in the last step, so that their episodes were dropped."""
        self.times = EpisodeTimes(envs.task_E)
        """Wall-clock seconds of finished episodes."""
        self.running = RunningEpisodes(envs.task_E, envs.spec_.info_keys)
        """Sums over the running episodes. Read-only: ``step`` and ``set_state`` change them."""
        self.observation_ED: npt.NDArray | None = None
        """The last observations, for which the next actions are chosen; None before ``reset``.
        Read-only: ``step`` and ``set_state`` change them."""
        self._unreported_info = set(envs.spec_.info_keys)
        self._first_ends: dict[int, list[tuple[int, bool]]] = {int(t): [] for t in envs.task_E}
        """Lengths of each task's first episodes, and whether they terminated."""
        self._mode: Mode = "explore"
        self._events = EpisodeEvents(self.listeners, envs)
        self._env_E = np.arange(envs.num_envs)
        self._action_EA: npt.NDArray[np.float32] | None = None
        self._policy_columns: Mapping[str, npt.NDArray] = {}

    @property
    def policy(self) -> Policy:
        """The current policy."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._matched_policy = matched_policy(policy, self.envs.spec_, self.envs.task_E)
        self._policy = policy

    @property
    def weights_seq_no(self) -> int:
        """Number of updates of the policy's weights; 0 if it has no weights."""
        return self.policy.counters.updates if isinstance(self.policy, WeightedPolicy) else 0

    @property
    def has_started(self) -> bool:
        """Whether episodes have started."""
        return self.observation_ED is not None

    @property
    def is_step_pending(self) -> bool:
        """Whether ``send`` has started a step that ``receive`` has not returned."""
        return self._action_EA is not None

    def reset(self, seed: int | Sequence[int] | None = None) -> None:
        """Start a new episode in every environment; unfinished ones are dropped and not counted.

        Args:
            seed: seed of all following episodes (see ``Benchmark``); None to start the
                environments' next episodes.
        """
        assert not self.is_step_pending, "a step is pending"
        everywhere = range(self.envs.num_envs)
        self._events.built()
        self._events.created(everywhere)
        self.running.reset()
        self.paused_E = np.zeros(self.envs.num_envs, np.bool_)
        self.observation_ED, _ = self.envs.reset(seed=seed)
        self.times.start(slice(None))
        for extra in self.extras:
            extra.start_episodes(np.ones(self.envs.num_envs, np.bool_), {}, self.windows)
        self._events.started(self.observation_ED, everywhere)

    def choose_paused(self) -> None:
        """Choose the environments to pause from now on; without ``PauseSolved``, none."""
        self.paused_E = np.zeros(self.envs.num_envs, np.bool_)
        if self._pausing is not None:
            self.paused_E = self._pausing.paused(self.envs.spec_, self.envs.task_E, self.windows)

    def stepped_fractions(self) -> dict[int, float]:
        """Return the fraction of each task's environments that are not paused."""
        return task_means(~self.paused_E, self.envs.task_E)

    @property
    def foreign_E(self) -> npt.NDArray[np.bool_]:
        """Environments in whose current episode the policy of another task acts."""
        if self._reuse is None:
            return np.zeros(self.envs.num_envs, np.bool_)
        return self._reuse.is_foreign_E

    def send(self, mode: Mode) -> None:
        """Choose actions and send them to the environments; the first call resets them.

        Raises:
            PolicyFaultError: if an action is not finite.
        """
        assert not self.is_step_pending, "a step is pending"
        if self.observation_ED is None:
            self.reset()
        self._events.built()
        assert self.observation_ED is not None
        # a copy, because this observation becomes part of the transition, and a policy may write
        # into its argument (MetaWorld's scripted door-open policy does)
        copied_ED = self.observation_ED.copy()
        task_E = self.envs.task_E
        if self._reuse is not None:
            if mode != "explore":
                self._reuse.end()
            task_E = self._reuse.acting_task_E
        noise = {}
        if self._exploration is not None and mode == "explore":
            noise["noise_EA"] = self._exploration.noise()
        output = self._matched_policy.act(copied_ED, task_E, mode, **noise)
        chosen_EA, self._policy_columns = output if isinstance(output, tuple) else (output, {})
        # transitions contain the original action; the environments receive the transformed one
        action_EA = np.array(chosen_EA, np.float32)
        is_training = mode != "exploit"
        sent_EA = sent_actions(self.action_transforms, action_EA, self.envs.task_E, is_training)
        self.envs.send(sent_EA, self.paused_E)
        self._mode = mode
        self._action_EA = action_EA

    def receive(
        self, selected_E: npt.NDArray[np.bool_] | None = None
    ) -> tuple[Transitions, dict[int, Episode]]:
        """Wait for the step that ``send`` started.

        Args:
            selected_E: environments whose transitions are returned; None for all.

        Returns:
            The valid transitions, and the finished episodes by environment.
        """
        assert self._action_EA is not None, "call send() first"
        assert self.observation_ED is not None
        observation_ED = self.observation_ED
        action_EA = self._action_EA
        self._action_EA = None
        result = self.envs.receive()
        self.observation_ED = result.observation_ED
        ended = self.running.add(result)
        # exclude episodes in which the policy of another task acted
        foreign_E = self.foreign_E
        self.windows.add(episode for env, episode in ended.items() if not foreign_E[env])
        self.times.end(ended)
        # a rebuilt environment also starts a new episode, but the old one is not finished
        done_E = result.done_E
        if done_E.any():
            self.times.start(done_E)
            for extra in self.extras:
                extra.start_episodes(done_E, ended, self.windows)
        if ended and self._unreported_info:
            self._warn_of_unreported_info()
        if self._mode != "exploit":
            self._warn_of_time_limits(ended, result.terminated_E)
        kept_E = result.valid_E if selected_E is None else result.valid_E & selected_E
        kept = slice(None) if kept_E.all() else kept_E
        columns = {**result.extra, **self._policy_columns}
        if self._reuse is not None:
            columns["foreign"] = foreign_E
        # next_observation is the true successor, even if the next step starts a new episode
        transitions = Transitions(
            observation_ED[kept],
            action_EA[kept],
            result.reward_E[kept],
            result.next_observation_ED[kept],
            result.terminated_E[kept],
            result.truncated_E[kept],
            self.envs.task_E[kept],
            self._env_E[kept],
            {name: np.asarray(column)[kept] for name, column in columns.items()},
        )
        self.dropped_E = ~(result.valid_E | result.paused_E)
        self.counters.vector_steps += 1
        self.counters.env_steps += int(result.valid_E.sum())
        self.counters.dropped_transitions += int(self.dropped_E.sum())
        self.counters.episodes += len(ended)
        self._events.stepped(self.running, ended, result.observation_ED, done_E)
        return transitions, ended

    def step(
        self, mode: Mode, selected_E: npt.NDArray[np.bool_] | None = None
    ) -> tuple[Transitions, dict[int, Episode]]:
        """Call ``send`` and ``receive``."""
        self.send(mode)
        return self.receive(selected_E)

    def sample(
        self,
        *,
        num_steps: int | None = None,
        num_episodes: int | None = None,
        mode: Mode = "explore",
        force_reset: bool = False,
        seed: int | Sequence[int] | None = None,
    ) -> Sample:
        """Collect a number of steps or episodes.

        Args:
            num_steps: environment steps, rounded up to full vector steps; episodes continue across
                calls.
            num_episodes: episodes, divided evenly among environments to avoid a bias towards short
                ones; all of them start with a reset, and steps beyond an environment's share are
                dropped.
            mode: how the policy selects actions.
            force_reset: whether to start new episodes when collecting steps, too.
            seed: seed of the environments and the policy's noise: the same seed gives the same
                episodes. The policy is seeded if it has ``seed_actions``, as all algorithms and
                loaded policies do.
        """
        if (num_steps is None) == (num_episodes is None):
            raise ConfigurationError("give either num_steps or num_episodes")
        at_least(1, num_steps=num_steps, num_episodes=num_episodes)
        if seed is not None:
            self._seed(seed)
        is_fresh = force_reset or seed is not None or num_episodes is not None
        if is_fresh or not self.has_started:
            self.reset(seed)
        weights_seq_no = self.weights_seq_no
        steps: Iterable[tuple[Transitions, dict[int, Episode]]]
        if num_steps is None:
            assert num_episodes is not None
            steps = self.run_episodes(quotas(num_episodes, self.envs.num_envs), mode)
        else:
            num_vector_steps = -(-num_steps // self.envs.num_envs)  # rounded up
            steps = (self.step(mode) for _ in range(num_vector_steps))
        parts, ended = zip(*steps, strict=True)
        episodes = [episode for of_step in ended for episode in of_step.values()]
        sample = Sample(concatenated(parts), episodes, weights_seq_no)
        for listener in self.listeners:
            listener.on_sample_end(sample)
        return sample

    def _seed(self, seed: int | Sequence[int]) -> None:
        """Seed all random numbers except those of the environments."""
        seeds = np.random.SeedSequence(seed)
        if isinstance(self.policy, SeededPolicy):
            self.policy.seed_actions(int(seeds.generate_state(1)[0]))
        for extra in self.extras:
            extra.seed(int(seeds.generate_state(2 + extra.stream)[-1]))

    def run_episodes(
        self, quota_E: npt.NDArray[np.int64], mode: Mode
    ) -> Iterator[tuple[Transitions, dict[int, Episode]]]:
        """Yield steps until each environment ``e`` has finished ``quota_E[e]`` episodes.

        Call ``reset`` before. Steps of an environment beyond its quota are dropped.
        """
        remaining_E = quota_E.copy()
        while remaining_E.any():  # environments beyond their quota are stepped, too
            transitions, ended = self.step(mode, selected_E=remaining_E > 0)
            counted = {e: episode for e, episode in ended.items() if remaining_E[e]}
            remaining_E[list(counted)] -= 1
            yield transitions, counted

    def _warn_of_unreported_info(self) -> None:
        """Warn once if no environment has reported a key of ``data.info_keys``."""
        self._unreported_info -= set(self.windows.info())
        if self.windows.count_T[np.unique(self.envs.task_E)].all() and self._unreported_info:
            names = ", ".join(sorted(self._unreported_info))
            warnings.warn(
                f"no environment has reported {names} in info after an episode of every task:"
                " correct data.info_keys if the names are wrong",
                stacklevel=2,
            )
            self._unreported_info = set()

    def _warn_of_time_limits(
        self, ended: Mapping[int, Episode], terminated_E: npt.NDArray[np.bool_]
    ) -> None:
        """Warn of a task whose first episodes all terminate after the same number of steps."""
        for env, episode in ended.items():
            ends = self._first_ends[episode.task]
            if len(ends) == EQUAL_ENDS:
                continue
            ends.append((episode.length, bool(terminated_E[env])))
            if ends == [(episode.length, True)] * EQUAL_ENDS and episode.length > 1:
                warnings.warn(
                    f"the first {EQUAL_ENDS} episodes of {self.envs.spec_.task_names[episode.task]}"
                    f" have all terminated after {episode.length} steps. If that is a time limit,"
                    " return truncated, as gymnasium.wrappers.TimeLimit does, because targets do"
                    " not bootstrap after terminated. If the task ends there, ignore this",
                    stacklevel=3,
                )

    def get_state(self, components: Sequence[str] = collector_state.COMPONENTS) -> dict[str, Any]:
        """Return components of the state as plain values, for ``set_state``.

        Args:
            components: any of ``windows`` (finished episodes), ``episodes`` (running episodes and
                the environments' states, fetched from the workers), ``listeners``,
                ``action_transforms``, ``extras``, and ``weights`` (the policy's, with their
                ``weights_seq_no``); by default all except the weights. The weights can be loaded by
                a collector of other environments.
        """
        return collector_state.get_state(self, components)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the components in a state; with all of them, collection continues exactly.

        Weights are loaded if they have had more updates than the policy's own, or if their
        ``weights_seq_no`` is 0, as after a restart of the learner; older weights are ignored.
        """
        collector_state.set_state(self, state)
        if "windows" in state:  # their episodes have already reported these keys
            self._unreported_info -= set(self.windows.info())

    # aliases with the names common to all stateful objects
    state_dict = get_state
    load_state_dict = set_state
