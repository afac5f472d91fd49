"""Full-length episodes of a policy: each has its own seed, with which it can be repeated.

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
from mtrl_lightning.spec import EnvSpec
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
"""Environments that are stepped at once where there are fewer tasks, whatever the number of cores:
the noise of a policy depends on how many rows it acts for at once."""
ATTEMPTS = 10
"""Episodes of a task that are run at most for each success that is wanted."""


class UniformPolicy:
    """Actions at random, uniformly.

    Args:
        spec: of the benchmark.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self._mask_TA = spec.action_mask_TA
        self._generator = np.random.default_rng(0)

    def seed_actions(self, seed: int) -> None:
        """Seed the actions."""
        self._generator = np.random.default_rng(seed)

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode = "random"
    ) -> npt.NDArray[np.float32]:
        """Choose actions ``[E, A]`` between -1 and 1; zeros where a task's own action ends."""
        action_EA = self._generator.uniform(-1.0, 1.0, self._mask_TA[task_E].shape)
        return (action_EA * self._mask_TA[task_E]).astype(np.float32)


class _WithNoise:
    """A policy with normal noise added to its actions, which are kept as ``policy_action``."""

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
    """A vector environment whose transitions have the success of the step as a field."""

    def receive(self) -> StepResult:
        result = super().receive()
        return result._replace(extra={**result.extra, "success": result.success_E})


class Collected(NamedTuple):
    """Episodes that were collected."""

    episodes: dict[str, list[RecordedEpisode]]
    """Of each task by its name, in the order of their attempts. Their ``infos`` have ``success`` if
    the benchmark reports it; with noise ``policy_action``, the actions without it; and the spec's
    ``info_fields``."""
    attempts: dict[str, int]
    """Episodes of each task that were run until its last one here, or in all if they were not
    enough."""


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
    """Run full-length episodes of every task of a split, with the policy's best actions.

    The same seed gives the same episodes, with any number of workers.

    Args:
        policy: its tasks are matched by name if it knows them.
        benchmark: the tasks.
        num_episodes: of each task.
        split: which environments; None for the first, which is trained on.
        successes_only: leave out episodes without a success in any step, and run further ones
            instead.
        attempts: episodes that are run at most for each success that is wanted.
        seed: of the episodes in the split that is trained on, of the noise, and of the policy's
            random numbers. In other splits the episodes are the test episodes 0, 1, 2, ...
        noise: standard deviation of normal noise that is added to the actions, 0 for none. The
            transitions have the noisy actions.
        num_workers: worker processes; None for all cores, 0 for this process.
        progress: whether bars show built environments and steps, on a terminal.

    Raises:
        EnvironmentFaultError: if an environment breaks.
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
        benchmark, task_E.tolist(), split, num_workers=num_workers, progress=progress
    )
    try:
        collector = Collector(envs, acting)
        with one_thread(), progress_bar("env steps", total, progress) as bar:
            while not all(map(is_done, tasks)):
                # a round: the next attempts of each task, at most one in every environment
                attempt_E = np.tile(np.arange(envs_per_task), len(tasks))
                attempt_E += [made[task] for task in task_E]
                seeds = [seed_of(*one) for one in zip(task_E, attempt_E.tolist(), strict=True)]
                is_run_E = np.array([not is_done(task) for task in task_E])
                is_run_E &= attempt_E < most_attempts
                for env, episode in _round(collector, seeds, is_run_E, bar.update).items():
                    task = int(task_E[env])
                    is_kept = not successes_only or bool(episode.infos["success"].any())
                    bar.total += 0 if is_kept else episode.num_steps
                    if is_done(task):  # attempts after the last that is needed do not count
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
            f" {', '.join(names.values())}: raise --attempts, or give a better policy"
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
    """Run an episode in some environments; return the episode of each, in their order."""
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
