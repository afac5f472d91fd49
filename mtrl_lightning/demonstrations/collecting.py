"""Collect full-length episodes of a policy, each reproducible from its own seed.

Shapes: ``T`` tasks, ``E`` environments, ``N`` transitions, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import at_least
from mtrl_lightning.demonstrations.minari_files import RecordedEpisode
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark, check_spec, tasks_of
from mtrl_lightning.envs.vector.vector import VectorEnv, default_num_workers
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.rollout import Collector
from mtrl_lightning.rollout.matching import matched_policy
from mtrl_lightning.rollout.sample import concatenated
from mtrl_lightning.spec import EnvSpec, chosen, one_hot_rows
from mtrl_lightning.transitions import (
    POLICY_ACTION,
    ActOutput,
    Mode,
    Policy,
    SeededPolicy,
    StepResult,
)
from mtrl_lightning.utils.devices import one_thread
from mtrl_lightning.utils.progress import progress_bar

MOST_ENVS = 32
"""Maximum number of environments stepped together if there are fewer tasks, independent of the
number of cores, because a policy's noise depends on the batch size."""
ATTEMPTS = 10
"""Maximum number of episodes per requested success of a task."""


class UniformPolicy:
    """Sample actions uniformly.

    Args:
        spec: the tasks.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self._mask_TA = spec.action_mask_TA
        self._generator = np.random.default_rng(0)

    def seed_actions(self, seed: int) -> None:
        """Seed the random actions."""
        self._generator = np.random.default_rng(seed)

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode = "random"
    ) -> npt.NDArray[np.float32]:
        """Choose actions ``[E, A]`` between -1 and 1, 0 in padding."""
        action_EA = self._generator.uniform(-1.0, 1.0, self._mask_TA[task_E].shape)
        if self.spec.is_discrete:
            score_EA = np.where(self._mask_TA[task_E], action_EA, -np.inf)
            choices = self.spec.action_choices
            return one_hot_rows(chosen(score_EA, choices), choices)
        return (action_EA * self._mask_TA[task_E]).astype(np.float32)


class _WithNoise:
    """Add normal noise to a policy's actions, and return the originals as ``policy_action``."""

    def __init__(self, policy: Policy, spec: EnvSpec, std: float, seed: int) -> None:
        self._policy = policy
        self._mask_TA = spec.action_mask_TA
        self._std = std
        self._generator = np.random.default_rng(seed)

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode
    ) -> ActOutput:
        chosen = self._policy.act(observation_ED, task_E, mode)
        action_EA = np.asarray(chosen[0] if isinstance(chosen, tuple) else chosen, np.float32)
        noise_EA = self._std * self._generator.standard_normal(action_EA.shape)
        noisy_EA = action_EA + noise_EA * self._mask_TA[task_E]
        return noisy_EA.clip(-1.0, 1.0).astype(np.float32), {POLICY_ACTION: action_EA}


class _ReportingSuccess(VectorEnv):
    """A vector environment with the success of each step as a field of its transitions."""

    def receive(self) -> StepResult:
        result = super().receive()
        return result._replace(extra={**result.extra, "success": result.success_E})


class Collected(NamedTuple):
    """Collected episodes."""

    episodes: dict[str, list[RecordedEpisode]]
    """Episodes by task name, in the order of their attempts. Their ``infos`` have ``success`` if
    the benchmark reports it; with noise, ``policy_action``, the noise-free actions; and the spec's
    ``info_fields``."""
    attempts: dict[str, int]
    """Number of episodes run per task until the last one collected, or in total if there were too
    few successes."""


def collect(
    policy: Policy,
    benchmark: Benchmark,
    num_episodes: int,
    *,
    split: str | None = None,
    successes_only: bool = False,
    attempts: int = ATTEMPTS,
    seed: int = 0,
    noise: float = 0.0,
    num_workers: int | None = None,
    progress: bool = False,
) -> Collected:
    """Run full-length episodes of every task of a split, with the policy's deterministic actions.

    The same seed gives the same episodes, regardless of the number of workers.

    Args:
        policy: a policy; if it has task names, tasks are matched by name.
        benchmark: the tasks.
        num_episodes: number of episodes per task.
        split: the split; None for the first, which is used for training.
        successes_only: whether to replace episodes without success in any step by further ones.
        attempts: maximum number of episodes per requested success.
        seed: seed of the training episodes, of the noise and of the policy's random numbers. Other
            splits use the test episodes 0, 1, 2, ... instead.
        noise: standard deviation of normal noise added to the actions, 0 for none. The transitions
            contain the noisy actions.
        num_workers: worker processes; None for one per core, 0 to use this process.
        progress: whether to show a progress bar of the steps on a terminal.

    Raises:
        EnvironmentFaultError: if an environment fails.
        PolicyFaultError: if the policy's actions are not finite.
    """
    at_least(1, num_episodes=num_episodes, attempts=attempts)
    at_least(0, seed=seed, noise=noise)
    spec = check_spec(benchmark.spec)
    split = benchmark.splits[0] if split is None else split
    tasks = tasks_of(benchmark, split)
    if successes_only and not spec.has_success:
        raise ConfigurationError(
            "the benchmark reports no success: collect without --successes_only"
        )
    of_policy, of_noise = np.random.SeedSequence(seed).generate_state(2).tolist()
    if isinstance(policy, SeededPolicy):
        policy.seed_actions(of_policy)
    acting = matched_policy(policy, spec, tasks)
    if noise:
        acting = _WithNoise(acting, spec, noise, of_noise)

    envs_per_task = max(1, min(num_episodes, MOST_ENVS // len(tasks)))
    task_E = np.repeat(tasks, envs_per_task)
    most_attempts = num_episodes * (attempts if successes_only else 1)
    kept: dict[int, list[RecordedEpisode]] = {task: [] for task in tasks}
    made = dict.fromkeys(tasks, 0)

    def is_done(task: int) -> bool:
        return len(kept[task]) == num_episodes or made[task] == most_attempts

    def seed_of(task: int, attempt: int) -> int:
        """Return the seed of an attempt, which does not depend on the other tasks."""
        if split != benchmark.splits[0]:
            return attempt
        entropy = [seed, zlib.crc32(spec.task_names[task].encode()), attempt]
        return int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)

    if num_workers is None:
        num_workers = default_num_workers(len(task_E), spare=0)
    total = len(tasks) * num_episodes * benchmark.horizon_of(split)
    envs = (_ReportingSuccess if spec.has_success else VectorEnv)(
        benchmark, task_E.tolist(), split, num_workers=num_workers
    )
    try:
        collector = Collector(envs, acting)
        with one_thread(), progress_bar("env steps", total, progress) as bar:
            while not all(map(is_done, tasks)):
                # one round: the next attempts of each task, at most one per environment
                attempt_E = np.tile(np.arange(envs_per_task), len(tasks))
                attempt_E += [made[task] for task in task_E]
                seeds = [seed_of(*one) for one in zip(task_E, attempt_E.tolist(), strict=True)]
                is_run_E = np.array([not is_done(task) for task in task_E])
                is_run_E &= attempt_E < most_attempts
                for env, episode in _round(collector, seeds, is_run_E, bar.update).items():
                    task = int(task_E[env])
                    is_kept = not successes_only or bool(episode.infos["success"].any())
                    bar.total += 0 if is_kept else episode.num_steps
                    if is_done(task):  # attempts after the last one needed do not count
                        continue
                    made[task] += 1
                    if is_kept:
                        kept[task].append(episode)
    finally:
        envs.close()
    names = {task: spec.task_names[task] for task in tasks}
    if not any(kept.values()):
        raise ConfigurationError(
            f"no episode succeeded in {most_attempts} attempts at each of"
            f" {', '.join(names.values())}: raise --attempts, or use a better policy"
        )
    return Collected(
        {names[task]: of_task for task, of_task in kept.items()},
        {names[task]: number for task, number in made.items()},
    )


def _round(
    collector: Collector,
    seeds: list[int],
    is_run_E: npt.NDArray[np.bool_],
    on_rows: Callable[[int], object],
) -> dict[int, RecordedEpisode]:
    """Run one episode in each selected environment, and return them by environment."""
    collector.reset(seed=seeds)
    collector.paused_E = ~is_run_E
    parts = []
    for transitions, ended in collector.run_episodes(is_run_E.astype(np.int64), "exploit"):
        collector.paused_E[list(ended)] = True
        parts.append(transitions)
        on_rows(len(transitions.reward_E))
    rows = concatenated(parts)
    stored = {"success", POLICY_ACTION, *(field.name for field in collector.envs.spec_.info_fields)}
    episodes = {}
    for env in np.flatnonzero(is_run_E).tolist():
        of_env = rows.env_E == env
        last_observation = rows.next_observation_ED[of_env][-1:]
        episodes[env] = RecordedEpisode(
            np.concatenate([rows.observation_ED[of_env], last_observation]),
            rows.action_EA[of_env],
            rows.reward_E[of_env],
            rows.terminated_E[of_env],
            rows.truncated_E[of_env],
            {name: column[of_env] for name, column in rows.extra.items() if name in stored},
            seeds[env],
        )
    return episodes
