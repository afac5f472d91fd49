"""The training environments of a run, and the loop that steps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning.algorithms.description import summarize
from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.callbacks.drift import check_equal
from mtrl_lightning.callbacks.progress import shows_progress
from mtrl_lightning.callbacks.trainer_options import check_checkpoint_callbacks
from mtrl_lightning.checks import above, at_least, nearest_multiples, within
from mtrl_lightning.envs.vector.vector import VectorEnv, default_num_workers
from mtrl_lightning.errors import ConfigurationError, Interrupted, RestartsExhaustedError
from mtrl_lightning.learning.transforms import RewardScale
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.distributed import RANK_TIMEOUT
from mtrl_lightning.replay.rollout_buffer import rows_per_task
from mtrl_lightning.rollout import (
    ActionTransform,
    Collector,
    CorrelatedNoise,
    EpisodeListener,
    PauseSolved,
    PolicyReuse,
)
from mtrl_lightning.rollout.exploration import check_takes_noise
from mtrl_lightning.run.data import check_share
from mtrl_lightning.run.kinds import refuse_options, refused_by
from mtrl_lightning.run.loop import TrainingLoop
from mtrl_lightning.run.registered import StepAction
from mtrl_lightning.run.session import Session
from mtrl_lightning.schedules import Every, UpdateRatio

WARMUP_STEPS = 10_000
"""Environment steps of the warm-up if none are given."""


class RolloutCallback(SessionCallback):
    """Own the training environments, and create the loop that steps them.

    An off-policy algorithm fills its replay and learns from it at the same time. An on-policy one
    collects an iteration and then learns from that alone. ``TrainingLoop`` has the order. An
    offline one has no training environments: in all schedules an update then counts as one
    environment step, and so it does in the metrics' ``env_steps``.

    Args:
        total_steps: environment steps after which training ends; an on-policy algorithm finishes
            its iteration. Offline they are updates.
        warmup_steps: off-policy only: environment steps with uniformly random actions before the
            first update; null for 10,000.
        warmup_updates: off-policy only: updates made at once when the warm-up ends (mtrl makes as
            many as vector steps of warm-up).
        updates_per_step: off-policy only: updates per vector step (all environments once), also
            fractional; null for 1.
        envs_per_task: not offline: environments per task, over all processes.
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
        listeners: not offline: called at the events of every training episode, chosen by
            ``class_path``; see ``EpisodeListener``.
        action_transforms: change the actions that are sent to the environments, one after another;
            the actions that the policy chose are stored. An evaluation has them too, without noise.
            Chosen by ``class_path``; see ``ActionTransform``.
        exploration: not offline: temporally correlated noise of the actions that explore; null for
            the algorithm's own, white noise. Chosen by ``class_path``: ``CorrelatedNoise``. The
            warm-up is uniformly random without it.
        midway_starts: not offline: fraction of the training episodes that begin where an earlier
            one came near a success, from 0 to 1, in a task that never succeeds; it falls with
            success. Repeated steps are not counted. See ``MidwayStarts``.
        after_success: not offline: steps after its first success at which a training episode is
            truncated, for tasks with a success signal; null lets it last to its end. See
            ``SuccessLimit``.
        pausing: not offline: fewer steps of solved tasks, so that the others get more of
            ``total_steps``; null steps all environments. Chosen by ``class_path``: ``PauseSolved``.
        reuse: not offline: policies of solved tasks act in some episodes of unsolved ones; null for
            none. Chosen by ``class_path``: ``PolicyReuse``.
        check_every: environment steps between two checks that all processes of a run still have the
            same weights, statistics and optimizer states; a difference ends the run. One process
            checks nothing.
        seed: of the environments, the action transforms and the exploration.
    """

    key = "rollout"
    learning_options = (
        "warmup_updates",
        "updates_per_step",
        "envs_per_task",
        "action_transforms",
        "exploration",
        "midway_starts",
        "after_success",
        "pausing",
        "reuse",
    )

    @refused_by(("on-policy", "offline"), "warmup_steps", "warmup_updates", "updates_per_step")
    @refused_by(
        ("offline",),
        "envs_per_task",
        "listeners",
        "exploration",
        "midway_starts",
        "after_success",
        "pausing",
        "reuse",
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
        exploration: CorrelatedNoise | None = None,
        midway_starts: float = 0.0,
        after_success: int | None = None,
        pausing: PauseSolved | None = None,
        reuse: PolicyReuse | None = None,
        check_every: int = 10_000,
        rank_timeout: float = RANK_TIMEOUT,
        seed: int = 0,
    ) -> None:
        at_least(
            1,
            prefix="rollout.",
            total_steps=total_steps,
            envs_per_task=envs_per_task,
            window=window,
        )
        at_least(1, prefix="rollout.", hint=", or null", learner_threads=learner_threads)
        at_least(0, prefix="rollout.", max_restarts=max_restarts)
        above(0, prefix="rollout.", timeout=timeout)
        within(0, 1, prefix="rollout.", midway_starts=midway_starts)
        at_least(0, prefix="rollout.", hint=", or null for none", after_success=after_success)
        if warmup_steps is not None:
            check_warmup(warmup_steps, total_steps)
        self._warmup_steps = WARMUP_STEPS if warmup_steps is None else warmup_steps
        self._ratio = UpdateRatio(
            1.0 if updates_per_step is None else updates_per_step, warmup_updates
        )
        self.total_steps = total_steps
        self.learner_threads = learner_threads
        self._drift_check = Every(check_every, "rollout.check_every")
        self._envs_per_task = envs_per_task
        self._num_workers = num_workers
        self._window = window
        self._timeout = timeout
        self._rank_timeout = rank_timeout
        self._max_restarts = max_restarts
        self._seed = seed
        self._listeners = listeners or []
        self._action_transforms = action_transforms or []
        self._exploration = exploration
        self._midway_starts = midway_starts
        self._after_success = after_success
        self._pausing = pausing
        self._reuse = reuse

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the training environments and take the memory for their transitions.

        For an offline algorithm, read the demonstrations.
        """
        super().setup(trainer, pl_module, stage)
        session = self.session
        session.action_transforms = self._action_transforms
        session.loop = TrainingLoop(session, self.total_steps, self._warmup_steps, self._ratio)
        if stage != TrainerFn.FITTING or session.is_open:
            return
        session.after_updates["check_drift"] = StepAction(self._check_drift)
        device = trainer.strategy.root_device
        if session.algorithm.kind == "offline":
            self._open_offline(trainer, device)
            return
        all_tasks = np.repeat(session.spec.train_tasks, self._envs_per_task)
        with distributed.raise_on_all_ranks(ConfigurationError):
            self._check_run(trainer, device)
            indices = self._local_indices(len(session.spec.train_tasks))
            self._check_options(len(all_tasks))
        envs = self._start_envs(all_tasks[indices].tolist(), indices, shows_progress(trainer))
        rank = distributed.rank()
        for index, transform in enumerate(self._action_transforms):
            # environments use (index,) or (index, restarts): a 0 keeps the streams distinct
            transform.seed(self._seed_of(index, 0, rank) if rank else self._seed_of(index, 0))
        if self._exploration is not None:
            # four numbers: keys of environments and transforms are shorter
            self._exploration.seed(self._seed_of(0, 0, 0, rank))
        if self._reuse is not None:
            self._reuse.seed(self._seed_of(0, 0, 1, rank))
        with distributed.raise_on_all_ranks(ConfigurationError):
            collector = Collector(
                envs,
                session.algorithm,
                counters=session.local_counters,
                window=-(-self._window // distributed.world_size()),
                listeners=self._listeners,
                action_transforms=self._action_transforms,
                exploration=self._exploration,
                pausing=self._pausing,
                reuse=self._reuse,
            )
            session.open(device, collector)
        _print_summary(session)  # with the exploration's noise, known once open
        if session.algorithm.collection is not None:
            self._print_whole_iterations()

    def _seed_of(self, *key: int) -> int:
        """Return the seed of the part with this key, from the section's seed."""
        return int(np.random.SeedSequence(self._seed, spawn_key=key).generate_state(1)[0])

    def _open_offline(self, trainer: Trainer, device: torch.device) -> None:
        session = self.session
        num_tasks = len(session.spec.train_tasks)
        with distributed.raise_on_all_ranks(ConfigurationError):
            self._check_run(trainer, device)
            check_share(session.data.batch_size, num_tasks, distributed.world_size())
            session.open(device)
        _print_summary(session)

    def _check_run(self, trainer: Trainer, device: torch.device) -> None:
        """Check options that concern all kinds of algorithms, before anything is built."""
        if distributed.world_size() > 1 and self._rank_timeout <= self._timeout:
            raise ConfigurationError(
                f"rollout.rank_timeout is {self._rank_timeout:g} s: give more than rollout.timeout,"
                f" {self._timeout:g} s, for which a process waits for a worker that hangs"
            )
        check_checkpoint_callbacks(trainer)
        session = self.session
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        sections = {one.key: one for one in callbacks if isinstance(one, SessionCallback)}
        refuse_options(session.algorithm.kind, {"data": session.data, **sections})

    def _start_envs(self, tasks: list[int], indices: list[int], progress: bool) -> VectorEnv:
        num_workers = self._num_workers
        if num_workers is None:
            spare = 0 if self.session.algorithm.collection is not None else 1
            num_workers = default_num_workers(len(tasks), spare, distributed.local_size())

        def note_restart(reason: str) -> None:
            """Count environments that were rebuilt after a fault, and report why."""
            self.session.local_counters.worker_restarts += 1
            distributed.warn(
                f"environments are rebuilt, restart {envs.num_restarts} of at most"
                f" {envs.max_restarts}: {reason}"
            )

        envs = VectorEnv(
            self.session.benchmark,
            tasks,
            seed=self._seed,
            num_workers=num_workers,
            timeout=self._timeout,
            max_restarts=self._max_restarts,
            on_restart=note_restart,
            indices=indices,
            midway_starts=self._midway_starts,
            after_success=self._after_success,
            progress=progress,
        )
        return envs

    def _local_indices(self, num_tasks: int) -> list[int]:
        """Return the indices of this process' environments among all: a part of each task's.

        Raises:
            ConfigurationError: if a task's environments cannot be divided equally.
        """
        envs_per_task = self._envs_per_task
        num_processes = distributed.world_size()
        check_envs_per_task(envs_per_task, num_processes)
        share = np.array_split(range(envs_per_task), num_processes)[distributed.rank()]
        return [task * envs_per_task + int(i) for task in range(num_tasks) for i in share]

    def _check_options(self, num_envs: int) -> None:
        """Check the options that depend on the algorithm, before environments are started."""
        if self._exploration is not None:
            check_takes_noise(self.session.algorithm)
        size = distributed.world_size()
        window = -(-self._window // size)
        for part in (self._pausing, self._reuse):
            if part is not None:
                part.check(self.session.spec, window, self._envs_per_task // size)
        if self._midway_starts and not self.session.spec.has_score:
            raise ConfigurationError(
                "rollout.midway_starts is above 0, and the tasks have neither a success signal nor"
                " a largest return, with which it would end: set it to 0"
            )
        if self._after_success is not None and not self.session.spec.has_success:
            raise ConfigurationError(
                "rollout.after_success ends episodes after a success, and the tasks report none:"
                " set it to null"
            )
        data = self.session.data
        num_tasks = len(self.session.spec.train_tasks)
        collection = self.session.algorithm.collection
        if collection is not None:
            rows_per_task(num_envs // distributed.world_size(), num_tasks, collection)
            return
        check_warmup(self._warmup_steps, self.total_steps)
        check_share(data.batch_size, num_tasks, distributed.world_size())
        if data.capacity < num_envs:
            raise ConfigurationError(
                f"data.capacity is {data.capacity} for {num_envs} environments"
                " (rollout.envs_per_task each task): give at least one transition per environment"
            )

    def _print_whole_iterations(self) -> None:
        buffer = self.session.rollout_buffer
        rows = buffer.collection.num_steps * buffer.num_envs * distributed.world_size()
        if self._pausing is None and self.total_steps % rows:
            whole = -(-self.total_steps // rows) * rows
            rank_zero_info(
                f"rollout.total_steps {self.total_steps:,} is rounded up to {whole:,},"
                f" whole iterations of {rows:,} env steps"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the end of the loop's iterator the only end of the run.

        Raises:
            ConfigurationError: if a restored iteration lacks fields that the algorithm needs.
        """
        self._check_columns()
        # Lightning ignores should_stop until so many epochs are over
        trainer.fit_loop.min_epochs = trainer.current_epoch + 1
        # evaluations have their own schedule; Lightning would count one more batch in a resumed run
        trainer.val_check_batch = float("inf")

    def _check_columns(self) -> None:
        algorithm = self.session.algorithm
        if algorithm.collection is None or not self.session.rollout_buffer.has_begun:
            return
        saved = set(self.session.rollout_buffer.computed_columns)
        needed = set(algorithm.computed_columns)
        # computed values may replace the policy's own, such as the first log_prob of PPO
        may_replace = {field.name for field in algorithm.policy_fields}
        if needed and not needed <= saved <= needed | may_replace:
            raise ConfigurationError(
                f"the checkpoint's iteration has the computed columns {', '.join(sorted(saved))},"
                f" this algorithm needs {', '.join(sorted(needed))}: continue with the algorithm's"
                " previous options, or from a checkpoint between two iterations"
            )

    def _check_drift(self, env_steps: int, at_end: bool) -> None:
        if self._drift_check(env_steps):
            check_equal(self.session.algorithm)

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's state, the schedule of the drift check and the environments' states."""
        session = self.session
        return {
            **session.loop.state_dict(),
            "collector": session.collector.state_dict() if session.has_envs else {},
            "check": self._drift_check.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them; an evaluation has no environments to restore."""
        self._drift_check.load_state_dict(state_dict["check"])
        if not self.session.has_envs and self.session.is_open:
            self.session.loop.load_state_dict(state_dict)
        elif self.session.is_open and state_dict["collector"]:
            self.session.loop.load_state_dict(state_dict)
            self.session.collector.load_state_dict(state_dict["collector"])

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save a run that was interrupted or is out of restarts; end the workers."""
        try:
            if trainer.state.fn == TrainerFn.FITTING and hasattr(self, "session"):
                self._end_failed(exception)
        finally:
            self._close(trainer)

    def _end_failed(self, exception: BaseException) -> None:
        session = self.session
        if not session.is_training:
            return
        is_whole = isinstance(exception, (Interrupted, RestartsExhaustedError))
        if distributed.world_size() > 1:
            is_whole = is_whole and getattr(exception, "is_on_all_ranks", False)
        if is_whole and session.checkpoints is not None:
            session.checkpoints.save_interrupted()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the workers."""
        self._close(trainer)

    def _close(self, trainer: Trainer) -> None:
        trainer.fit_loop.min_epochs = None  # Lightning's default: a trainer may fit a second time
        if hasattr(self, "session"):
            self.session.close()


def _print_summary(session: Session) -> None:
    """Print protocol, pipeline, algorithm, and the number of environments of this process."""
    protocol = {key: v for key, v in session.spec.protocol.items() if key != "wrappers"}
    rank_zero_info(", ".join(f"{key} {value}" for key, value in protocol.items()))
    algorithm = session.algorithm
    lines = [_pipeline(session), summarize(algorithm.description), algorithm.untrained_summary]
    each = distributed.per_rank_prefix()
    if session.has_envs:
        collector = session.collector
        envs = collector.envs
        lines += [
            "" if collector.exploration is None else f"Exploration: {collector.exploration}",
            "" if collector.pausing is None else f"Pausing: {collector.pausing}",
            "" if collector.reuse is None else f"Reuse: {collector.reuse}",
            f"{each}Stepping {envs.num_envs} environments of {len(session.spec.train_tasks)} tasks"
            f" in {envs.num_workers} workers",
        ]
    for line in lines:
        if line:
            rank_zero_info(line)
    num_processes = distributed.world_size()
    if num_processes > 1 and algorithm.kind != "on-policy":
        batch_size = session.data.batch_size
        rank_zero_info(
            f"{each}{batch_size // num_processes:,} of the {batch_size:,} transitions of a batch"
        )


def _pipeline(session: Session) -> str:
    """Describe the processing of observations, rewards and actions; empty without any."""
    wrappers = str(session.spec.protocol.get("wrappers", ""))
    transforms = [
        type(transform).__name__
        for transform in session.algorithm.transforms
        if type(transform) is not RewardScale  # which leaves rewards as they are
    ]
    action_transforms = [type(transform).__name__ for transform in session.action_transforms]
    pipelines = []
    if wrappers or transforms:
        steps = ["environment", wrappers, "stored", *transforms, "learner"]
        steps = [step for step in steps if step]
        pipelines.append(f"Observations and rewards: {' > '.join(steps)}")
    if action_transforms:
        steps = ["policy", "stored", *action_transforms, "environment"]
        pipelines.append(f"Actions: {' > '.join(steps)}")
    return ". ".join(pipelines)


def check_warmup(warmup_steps: int, total_steps: int) -> None:
    """Check that there is a warm-up, and that environment steps are left after it."""
    at_least(1, prefix="rollout.", warmup_steps=warmup_steps)
    if total_steps <= warmup_steps:
        raise ConfigurationError(
            f"rollout.total_steps {total_steps} must be above rollout.warmup_steps {warmup_steps}"
        )


def check_envs_per_task(envs_per_task: int, num_processes: int) -> None:
    """Check that each process can step the same number of environments of every task."""
    if envs_per_task % num_processes == 0:
        return
    near = nearest_multiples(envs_per_task, num_processes)
    raise ConfigurationError(
        f"rollout.envs_per_task is {envs_per_task} for {num_processes} processes, and each steps"
        f" the same number of environments of every task: give {near}"
    )
