"""Training data collected by stepping environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning.algorithms.arguments import summary
from mtrl_lightning.checks import above, at_least, nearest_multiples
from mtrl_lightning.data.task_data import TaskData
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.envs.vector.vector import VectorEnv, default_num_workers
from mtrl_lightning.errors import ConfigurationError, RestartsExhaustedError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout import (
    Collector,
    EndAfterSuccess,
    EpisodeListener,
    Extra,
    StartMidway,
)
from mtrl_lightning.rollout.extras import extra_of
from mtrl_lightning.transitions import Mode, Transitions


class EnvData(TaskData):
    """Training environments, and the collector that steps them.

    Args:
        benchmark: the tasks.
        total_steps: environment steps after which training ends; see ``TaskData`` for further
            options.
        envs_per_task: environments per task, over all processes.
        num_workers: worker processes that step environments; 0 to use this process. None for one
            per core, leaving one core for training unless the algorithm is on-policy.
        window: number of finished episodes per task over which ``rollout/...`` metrics are
            averaged.
        timeout: seconds after which an unresponsive worker counts as hung.
        max_restarts: number of times faulty environments are rebuilt, over all processes since the
            program started: environments that raised or returned a NaN, or whose worker died or
            hung. The next fault saves and ends the run.
        listeners: called on the events of every training episode; see ``EpisodeListener``.
        extras: modify how training episodes are collected, at most one of each class:
            ``StartMidway``, ``EndAfterSuccess``, ``PauseSolved``, ``PolicyReuse``,
            ``CorrelatedNoise``.
        options: arguments of ``TaskData``.
    """

    spare_cores = 1
    """Number of cores reserved for this process while workers step."""

    def __init__(
        self,
        benchmark: Benchmark,
        total_steps: int = 1_000_000,
        envs_per_task: int = 1,
        num_workers: int | None = None,
        window: int = 50,
        timeout: float = 300.0,
        max_restarts: int = 10,
        listeners: list[EpisodeListener] | None = None,
        extras: list[Extra] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(benchmark, total_steps, **options)
        at_least(1, prefix="data.", envs_per_task=envs_per_task, window=window)
        at_least(0, prefix="data.", max_restarts=max_restarts)
        above(0, prefix="data.", timeout=timeout)
        self._envs_per_task = envs_per_task
        self._num_workers = num_workers
        self._window = window
        self._timeout = timeout
        self._max_restarts = max_restarts
        self._listeners = listeners or []
        self._extras = extras or []
        kinds = [type(extra) for extra in self._extras]
        if len(set(kinds)) < len(kinds):
            raise ConfigurationError("data.extras has two objects of the same class: remove one")

    @property
    def num_envs(self) -> int:
        """Number of training environments over all processes."""
        return len(self.spec.train_tasks) * self._envs_per_task

    def setup(self, stage: str) -> None:
        """Start the training environments and allocate memory for their transitions."""
        super().setup(stage)
        if stage != "fit" or self.collector is not None:
            return
        all_tasks = np.repeat(self.spec.train_tasks, self._envs_per_task)
        size = distributed.world_size()
        with distributed.raise_on_all_ranks(ConfigurationError):
            indices = self.envs_of(distributed.rank())
            self.check_options()
            for extra in self._extras:
                extra.check(self.spec, self._window, self._envs_per_task // size)
        envs = self._start_envs(all_tasks[indices].tolist(), indices)
        self.algorithm.begin_exploring(all_tasks.tolist(), indices)
        rank = distributed.rank()
        for index, transform in enumerate(self.action_transforms):
            # environments use (index,) or (index, restarts): the 0 keeps the streams distinct
            transform.seed(self._seed_of(index, 0, rank) if rank else self._seed_of(index, 0))
        for extra in self._extras:
            # four numbers, because keys of environments and transforms are shorter
            extra.seed(self._seed_of(0, 0, extra.stream, rank))
        assert self.trainer is not None
        with distributed.raise_on_all_ranks(ConfigurationError):
            self.collector = Collector(
                envs,
                self.algorithm,
                counters=self.local_counters,
                window=self._window,
                listeners=self._listeners,
                action_transforms=self.action_transforms,
                extras=self._extras,
            )
            self.open_buffer(envs.task_E.tolist(), self.trainer.strategy.root_device)
        self._print_summary()

    def open_buffer(self, tasks: Sequence[int], device: torch.device) -> None:
        """Allocate memory for the transitions.

        Args:
            tasks: the task of each of this process' environments.
            device: the training device.
        """
        raise NotImplementedError

    def check_options(self) -> None:
        """Check the options that depend on the algorithm and the number of processes."""

    def _seed_of(self, *key: int) -> int:
        """Return the seed for a key."""
        return int(np.random.SeedSequence(self._seed, spawn_key=key).generate_state(1)[0])

    def envs_of(self, rank: int) -> list[int]:
        """Return the global indices of a process' environments, a share of each task's."""
        envs_per_task = self._envs_per_task
        size = distributed.world_size()
        if envs_per_task % size:
            raise ConfigurationError(
                f"data.envs_per_task is {envs_per_task}, which cannot be divided equally among"
                f" {size} processes: give {nearest_multiples(envs_per_task, size)}"
            )
        own = np.array_split(range(envs_per_task), size)[rank]
        num_tasks = len(self.spec.train_tasks)
        return [task * envs_per_task + int(i) for task in range(num_tasks) for i in own]

    def _start_envs(self, tasks: list[int], indices: list[int]) -> VectorEnv:
        num_workers = self._num_workers
        if num_workers is None:
            num_workers = default_num_workers(
                len(tasks), self.spare_cores, distributed.local_size()
            )

        def note_restart(reason: str) -> None:
            """Count environments that were rebuilt after a fault, and report why."""
            self.local_counters.worker_restarts += 1
            distributed.warn(
                f"rebuilding environments, restart {envs.num_restarts} of at most"
                f" {envs.max_restarts}: {reason}"
            )

        midway = extra_of(self._extras, StartMidway)
        early_end = extra_of(self._extras, EndAfterSuccess)
        envs = VectorEnv(
            self.benchmark,
            tasks,
            seed=self._seed,
            num_workers=num_workers,
            timeout=self._timeout,
            max_restarts=self._max_restarts,
            on_restart=note_restart,
            indices=indices,
            midway_starts=0.0 if midway is None else midway.fraction,
            after_success=None if early_end is None else early_end.steps,
        )
        return envs

    def begin(self) -> None:
        """Start the first episodes, unless they were restored."""
        self.is_training = True
        collector = self.collector
        assert collector is not None
        if not collector.has_started:
            collector.reset()

    def send(self, mode: Mode, may_pause: bool = False) -> None:
        """Choose actions and send them to the environments.

        Args:
            mode: how the policy selects actions.
            may_pause: whether environments may be paused or resumed before this step.
        """
        assert self.collector is not None
        self.is_busy = True
        with self.stopwatch.measure("act"):
            if mode == "explore" and may_pause:
                self.collector.choose_paused()
            self.collector.send(mode)

    def receive(self) -> None:
        """Wait for the step that ``send`` started, and store its transitions."""
        collector = self.collector
        assert collector is not None
        episodes = self.counters.episodes
        with self.stopwatch.measure("step"):
            transitions, _ = collector.receive()
            self.local_counters.repeated_steps += collector.envs.take_repeated_steps()
            self.exchange()  # afterwards, counts are those of all processes
        self.add(transitions)
        if collector.dropped_E.any():
            self.algorithm.transforms.drop_episodes(np.flatnonzero(collector.dropped_E))
        has_ended = self.counters.episodes > episodes
        self.algorithm.transforms.observe(transitions, has_ended)
        for call in self.after_step:
            call(self.counters.env_steps)

    def step(self, mode: Mode, may_pause: bool = False) -> None:
        """Make one vector step without overlapping updates; afterwards the state is complete."""
        self.check_faults()
        self.check_signals()
        self.send(mode, may_pause)
        self.receive()
        self.is_busy = False

    def add(self, transitions: Transitions) -> None:
        """Store the transitions of a vector step."""
        raise NotImplementedError

    def check_faults(self) -> None:
        """Raise the fault for which no restart was left, counting those of all processes.

        Raises:
            RestartsExhaustedError: on all processes.
        """
        assert self.collector is not None
        envs = self.collector.envs
        if distributed.world_size() == 1:
            if envs.fault is not None:
                raise envs.fault
            return
        if self._faulty_rank is not None:
            distributed.raise_together(envs.fault, [RestartsExhaustedError])
        if self._restarts > (envs.max_restarts or 0):
            exhausted = RestartsExhaustedError(
                f"environments were rebuilt {self._restarts} times over all processes,"
                f" but data.max_restarts is {envs.max_restarts}: see the warnings above"
            )
            exhausted.is_on_all_ranks = True  # type: ignore[attr-defined]
            raise exhausted

    def _print_summary(self) -> None:
        """Print protocol, algorithm, extras, and this process' number of environments."""
        assert self.collector is not None
        algorithm = self.algorithm
        envs = self.collector.envs
        each = distributed.per_rank_prefix()
        lines = [
            ", ".join(f"{key} {value}" for key, value in self.spec.protocol.items()),
            summary(algorithm.hyper_parameters),
            algorithm.untrained.summary,
            *(f"Extra: {extra}" for extra in self._extras),
            f"{each}Stepping {envs.num_envs} environments of {len(self.spec.train_tasks)} tasks"
            f" in {envs.num_workers} workers",
        ]
        for line in filter(None, lines):
            rank_zero_info(line)
