"""The training environments, stepped by the loop that the algorithm needs."""

from __future__ import annotations

from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning import distributed
from mtrl_lightning.callbacks.drift import check_equal
from mtrl_lightning.callbacks.driver import Driver, Loop
from mtrl_lightning.callbacks.off_policy import OffPolicyLoop, check_warmup
from mtrl_lightning.callbacks.on_policy import OnPolicyLoop
from mtrl_lightning.callbacks.progress import shows_progress
from mtrl_lightning.callbacks.trainer_options import check_checkpoint_callbacks
from mtrl_lightning.distributed import RANK_TIMEOUT
from mtrl_lightning.envs.vector import VectorEnv, default_num_workers
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.precision import check_precision
from mtrl_lightning.rollout import ActionTransform, EpisodeListener
from mtrl_lightning.schedules import Every, UpdateRatio


class RolloutCallback(Driver):
    """Step the training environments, in turn with the updates that the algorithm makes.

    An off-policy algorithm fills its replay and learns from it at the same time
    (``OffPolicyLoop``). An on-policy one collects an iteration and then learns from that alone
    (``OnPolicyLoop``).

    Args:
        total_steps: environment steps after which training ends; an on-policy algorithm finishes
            its iteration.
        warmup_steps: off-policy only: environment steps with uniformly random actions before the
            first update; null for 10,000.
        warmup_updates: off-policy only: updates made at once when the warm-up ends (mtrl makes as
            many as vector steps of warm-up).
        updates_per_step: off-policy only: updates per vector step (all environments once), also
            fractional; null for 1.
        envs_per_task: copies of each task's environment, over all processes.
        num_workers: worker processes that step environments; 0 for this process. Null for the cores
            but one, which learns meanwhile; for all cores if the algorithm is on-policy.
        learner_threads: threads of PyTorch on the CPU, set for the whole process; null leaves its
            own choice, one per core, which is slow where small networks share the cores with
            environments.
        window: finished episodes per task over which ``rollout/...`` metrics are averaged.
        timeout: seconds to wait for a worker before it counts as hung.
        rank_timeout: seconds that a process of a run of several waits for the others before one of
            them counts as lost, which ends the run; six times as long at the end of an evaluation.
        max_restarts: how often, from one start of the program to its end, broken environments are
            rebuilt, on all processes together: one that raised or returned a NaN, or whose worker
            died or hung. At the next fault the run saves and ends.
        listeners: called at the events of every training episode, chosen by ``class_path``; see
            ``EpisodeListener``.
        action_transforms: change the actions that are sent to the environments, one after another;
            the actions that the policy chose are stored. An evaluation has them too, without noise.
            Chosen by ``class_path``; see ``ActionTransform``.
        check_every: environment steps between two checks that all processes of a run still have the
            same weights, statistics and optimizer states; a difference ends the run. One process
            checks nothing.
        seed: of the environments and the action transforms.

    Raises:
        ConfigurationError: if a number is out of range.
    """

    learning_options = (
        "warmup_updates",
        "updates_per_step",
        "envs_per_task",
        "action_transforms",
    )

    def __init__(
        self,
        total_steps: int = 1_000_000,
        warmup_steps: int | None = None,
        warmup_updates: int = 0,
        updates_per_step: float | None = None,
        envs_per_task: int = 1,
        num_workers: int | None = None,
        learner_threads: int | None = None,
        window: int = 50,
        timeout: float = 300.0,
        max_restarts: int = 10,
        listeners: list[EpisodeListener] | None = None,
        action_transforms: list[ActionTransform] | None = None,
        check_every: int = 10_000,
        rank_timeout: float = RANK_TIMEOUT,
        seed: int = 0,
    ) -> None:
        if envs_per_task < 1 or total_steps < 1:
            raise ConfigurationError(
                f"rollout.envs_per_task is {envs_per_task}, rollout.total_steps {total_steps}:"
                " give at least 1"
            )
        if learner_threads is not None and learner_threads < 1:
            raise ConfigurationError(
                f"rollout.learner_threads is {learner_threads}: give at least 1, or null"
            )
        if window < 1 or timeout <= 0 or max_restarts < 0:
            raise ConfigurationError(
                f"rollout.window is {window}, rollout.timeout {timeout}: both must be above 0;"
                f" rollout.max_restarts is {max_restarts}: give 0 or more"
            )
        if warmup_steps is not None:
            check_warmup(warmup_steps, total_steps)
        super().__init__()
        self._warmup_steps = warmup_steps
        self._ratio = UpdateRatio(
            1.0 if updates_per_step is None else updates_per_step, warmup_updates
        )
        self.total_steps = total_steps
        self.learner_threads = learner_threads
        self._off_policy_options = {
            "rollout.warmup_steps": warmup_steps,
            "rollout.warmup_updates": warmup_updates or None,
            "rollout.updates_per_step": updates_per_step,
        }
        self._check = Every(check_every, "rollout.check_every")
        self._envs_per_task = envs_per_task
        self._num_workers = num_workers
        self._window = window
        self._timeout = timeout
        self._rank_timeout = rank_timeout
        self._max_restarts = max_restarts
        self._seed = seed
        self._listeners = listeners or []
        self._action_transforms = action_transforms or []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the training environments and take the memory for their transitions."""
        super().setup(trainer, pl_module, stage)
        session = self.session
        session.total_steps = self.total_steps
        session.action_transforms = self._action_transforms
        self.loop = self._make_loop()
        session.has_nothing_left = self._has_nothing_left
        session.unused_options = self.loop.unused_options
        if stage != TrainerFn.FITTING or session.is_open:
            return
        device = trainer.strategy.root_device
        all_tasks = np.repeat(session.spec.train_tasks, self._envs_per_task)
        with distributed.together(ConfigurationError):
            self._check_timeouts()
            check_checkpoint_callbacks(trainer)
            check_precision(trainer.precision, device)
            places = self._own_places(len(session.spec.train_tasks))
            self.loop.check(len(all_tasks))
            session.algorithm.check_device(device)
        tasks = all_tasks[places].tolist()
        num_workers = self._num_workers
        if num_workers is None:
            spare = 0 if session.algorithm.collection is not None else 1
            num_workers = default_num_workers(len(tasks), spare, distributed.local_size())
        envs = VectorEnv(
            session.benchmark,
            tasks,
            seed=self._seed,
            num_workers=num_workers,
            timeout=self._timeout,
            max_restarts=self._max_restarts,
            on_restart=lambda reason: session.note_restart(envs, reason),
            places=places,
            progress=shows_progress(trainer),
        )
        for place, transform in enumerate(self._action_transforms):
            # never an environment's key, whose length differs or whose second number is not 0
            rank = distributed.rank()
            key = (place, 0, rank) if rank else (place, 0)
            seeding = np.random.SeedSequence(self._seed, spawn_key=key)
            transform.seed(int(seeding.generate_state(1)[0]))
        with distributed.together(ConfigurationError):
            session.open(envs, self._window, device, self._listeners)
        self.loop.open()

    def _check_timeouts(self) -> None:
        if distributed.world_size() > 1 and self._rank_timeout <= self._timeout:
            raise ConfigurationError(
                f"rollout.rank_timeout is {self._rank_timeout:g} s: give more than rollout.timeout,"
                f" {self._timeout:g} s, for which a process waits for a worker that hangs"
            )

    def _own_places(self, num_tasks: int) -> list[int]:
        """Return the places of this process' environments among all: a part of each task's copies.

        Raises:
            ConfigurationError: if the copies cannot be shared out equally.
        """
        copies = self._envs_per_task
        num_processes = distributed.world_size()
        check_copies(copies, num_processes)
        share = np.array_split(range(copies), num_processes)[distributed.rank()]
        return [task * copies + int(copy) for task in range(num_tasks) for copy in share]

    def _make_loop(self) -> Loop:
        if self.session.algorithm.collection is not None:
            return OnPolicyLoop(self, self.total_steps, self._off_policy_options)
        return OffPolicyLoop(self, self.total_steps, self._warmup_steps, self._ratio)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Step until there is something to learn from; do what an interruption left undone.

        Raises:
            ConfigurationError: if an environment cannot be used.
        """
        session = self.session
        session.is_training = True
        if not session.collector.has_started:
            session.collector.reset()
        self.warn_of_lost_states()
        if session.counters.env_steps == 0:
            session.evaluate_at_start()
            session.save_at_start()
        self.loop.start()
        if self.is_finished():
            rank_zero_info(
                f"{session.counted_steps:,} env steps are made already:"
                " raise rollout.total_steps to continue"
            )
            trainer.should_stop = True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Do what the loop does before an update."""
        self.loop.before_batch()
        self.session.stopwatch.start("update")

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Do what the loop does after an update."""
        self.session.stopwatch.stop("update")
        self.hold_back_stop()
        self.loop.after_batch()

    def complete_step(self) -> None:
        """Do what is due after a vector step whose updates are made.

        Raises:
            DriftError: if the processes of the run no longer have the same weights.
        """
        if self._check(self.session.counters.env_steps):
            check_equal(self.session.algorithm)
        super().complete_step()

    def is_finished(self) -> bool:
        """Return whether all environment steps and their updates are made."""
        return self.loop.is_finished()

    def _has_nothing_left(self) -> bool:
        """Return whether the results of the last vector step are there, too."""
        return self.is_finished() and not self.has_pending_results

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's state, which call is next, and the environments' states."""
        own = {"check": self._check.state_dict()}
        return self.loop.state_dict() | super().state_dict() | own

    def restore(self, state_dict: dict[str, Any]) -> None:
        """Restore them; an evaluation has no environments to restore."""
        super().restore(state_dict)
        self._check.load_state_dict(state_dict.get("check", {"last": 0}))  # new in this version
        if self.session.is_open and state_dict["collector"]:
            self.loop.load_state_dict(state_dict)


def check_copies(copies: int, num_processes: int) -> None:
    """Check that each process can step the same number of copies of every task.

    Raises:
        ConfigurationError: naming the nearest numbers.
    """
    if copies % num_processes == 0:
        return
    below = copies // num_processes * num_processes
    near = " or ".join(str(n) for n in (below, below + num_processes) if n)
    raise ConfigurationError(
        f"rollout.envs_per_task is {copies} for {num_processes} processes, each of which steps the"
        f" same number of copies of every task: give {near}"
    )
