"""The data of an off-policy algorithm: environments that fill a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mtrl_lightning.checks import at_least
from mtrl_lightning.data.env_data import EnvData
from mtrl_lightning.data.task_data import ROWS_PER_TASK, check_batch_size
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay import ReplayBuffer, ReplaySnapshots
from mtrl_lightning.replay.index import needed_manifests, replay_folder
from mtrl_lightning.replay.sizes import replay_bytes
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.schedules import UpdateRatio
from mtrl_lightning.transitions import TransitionBatch, Transitions, transition_fields
from mtrl_lightning.utils.devices import CPU, free_memory

TRANSITIONS_PER_TASK = 100_000
"""Replay capacity per task in MetaWorld+'s protocol."""
WARMUP_VECTOR_STEPS = 4_000
"""Vector steps with random actions in MetaWorld+'s protocol."""


class ReplayData(EnvData):
    """Training environments, the replay that they fill, and batches sampled from it.

    Steps and updates overlap: a batch is sampled, actions are sent, the update is made while the
    workers step, and the transitions are received. The update does not use the step in flight,
    whose actions use the weights before the update: results do not depend on the speed of the
    workers. Further updates of the same step follow without stepping; if there are several steps
    between two updates, the last one overlaps.

    The replay is saved in ``replay/`` in the run folder, in immutable files that are written as
    soon as they are full: a checkpoint only adds the transitions of the last, incomplete file.
    Files that no checkpoint needs are deleted.

    Args:
        benchmark: the tasks.
        total_steps: environment steps after which training ends; see ``EnvData`` for further
            options.
        batch_size: global batch size, divided equally among trained tasks and processes. None for
            128 per task.
        capacity: capacity of the replay in transitions over all trained tasks and processes,
            divided equally among environments. None for ``total_steps``, at most 100,000 per task.
        warmup_steps: environment steps with uniformly random actions before the first update; None
            for a tenth of the run, at most 4,000 per environment.
        warmup_updates: updates made at once when the warm-up ends (in mtrl, the number of vector
            steps of the warm-up).
        updates_per_step: updates per vector step (one step of all environments); may be fractional.
        memory_map: keep the replay in a memory-mapped file in the run folder, for a replay larger
            than the main memory.
        on_device: keep the replay in the memory of the training GPU if it takes at most half of its
            free memory, otherwise in main memory.
        save_replay: whether to save the replay with checkpoints; without it, a resumed run starts
            with an empty replay.
        save_last: number of newest transitions to save, over all environments; None for all.
        chunk_mebibytes: size of a file of the saved replay in MiB.
        restore_replay: whether a resumed run restores the replay of its checkpoint.
        delete_replay_at_end: whether to delete the files when the run is finished: afterwards, it
            can only be resumed with ``restore_replay`` false. An interrupted run keeps them.
        options: arguments of ``EnvData``.
    """

    kind = "off-policy"
    buffer: ReplayBuffer
    """The replay, available after ``setup``."""

    def __init__(
        self,
        benchmark: Benchmark,
        total_steps: int = 1_000_000,
        batch_size: int | None = None,
        capacity: int | None = None,
        warmup_steps: int | None = None,
        warmup_updates: int = 0,
        updates_per_step: float = 1.0,
        memory_map: bool = False,
        on_device: bool = True,
        save_replay: bool = True,
        save_last: int | None = None,
        chunk_mebibytes: float = 32.0,
        restore_replay: bool = True,
        delete_replay_at_end: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(benchmark, total_steps, **options)
        num_tasks = len(self.spec.train_tasks)
        self.batch_size = ROWS_PER_TASK * num_tasks if batch_size is None else batch_size
        check_batch_size(self.batch_size, num_tasks)
        if capacity is None:
            most = TRANSITIONS_PER_TASK * num_tasks
            capacity = max(min(total_steps + self.num_envs, most), self.batch_size)
            capacity = -(-capacity // self.num_envs) * self.num_envs
        if warmup_steps is None:
            # full vector steps, leaving at least one to learn from
            tenth = math.ceil(total_steps / 10 / self.num_envs) * self.num_envs
            most = min(WARMUP_VECTOR_STEPS * self.num_envs, total_steps - self.num_envs)
            warmup_steps = max(self.num_envs, min(tenth, most))
        at_least(1, prefix="data.", warmup_steps=warmup_steps)
        if total_steps <= warmup_steps:
            raise ConfigurationError(
                f"data.total_steps is {total_steps}: give more than data.warmup_steps,"
                f" {warmup_steps}"
            )
        if capacity < max(self.batch_size, self.num_envs):
            raise ConfigurationError(
                f"data.capacity is {capacity}: give at least {max(self.batch_size, self.num_envs)},"
                " a batch and one transition per environment"
            )
        self.capacity = capacity
        self.warmup_steps = warmup_steps
        self._ratio = UpdateRatio(updates_per_step, warmup_updates)
        self._memory_map = memory_map
        self._on_device = on_device
        self._save_replay = save_replay
        self._save_last = save_last
        self._chunk_mebibytes = chunk_mebibytes
        self._restore_replay = restore_replay
        self._delete_replay = delete_replay_at_end
        self._snapshots = self._snapshots_in(Path("replay"))  # checks the options
        self._has_write_failed = False
        """Whether the last write failed: no chunk is written until a save succeeds."""
        self._refill_steps = 0
        """Environment steps that refilled a lost replay, in addition to ``total_steps``."""
        self._opened_for: tuple[Any, ...] = ()

    # the loop

    def setup(self, stage: str) -> None:
        """Start the training environments and allocate the replay."""
        super().setup(stage)
        assert self.trainer is not None
        if stage == "fit" and self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.warmup_steps = 1

    def check_options(self) -> None:
        """Check that batches can be divided equally among processes."""
        check_batch_size(self.batch_size, len(self.spec.train_tasks), distributed.world_size())

    def _batch_rows(self) -> int:
        return self.batch_size

    def begin(self) -> None:
        """Start the episodes; refill a replay that was not restored."""
        super().begin()
        if self._ratio.has_started:
            self._refill()

    def begin_epoch(self) -> None:
        """Warm up with random actions, unless the warm-up is over."""
        counters = self.counters
        if not self._ratio.has_started:
            rank_zero_info(f"Warm-up: {self.warmup_steps:,} env steps with random actions")
            while counters.env_steps < self.warmup_steps:
                self.step("random")
        if counters.updates == 0:
            self.begin_learning()
        # updates are due for vector steps after the warm-up only
        self._ratio.start(counters.vector_steps, counters.updates)

    def _refill(self) -> None:
        """Collect with the policy until the replay has the transitions of a warm-up."""
        num_missing = self._num_missing()
        if num_missing <= 0 or self.is_over:
            return
        rank_zero_info(
            f"Refilling the replay with {num_missing:,} env steps of the policy, in addition to"
            f" data.total_steps {self.total_steps:,}"
        )
        counters = self.counters
        while self._num_missing() > 0:
            steps_before = counters.env_steps
            self.step("explore", self._may_pause)
            self._refill_steps += counters.env_steps - steps_before
        # no updates are due for the steps of the refill
        self._ratio.restart(counters.vector_steps, counters.updates)

    def _num_missing(self) -> int:
        """Return the number of transitions that the replay needs before an update."""
        # a replay smaller than the warm-up is full earlier
        most = self.buffer.guaranteed_size * distributed.world_size()
        return min(self.warmup_steps, most) - distributed.total(len(self.buffer))

    @property
    def _may_pause(self) -> bool:
        # environments are paused and resumed at intervals of the longest episode
        return self.counters.vector_steps % self.spec.horizon == 0

    def next_batch(self) -> TransitionBatch:
        """Sample this process' share of a batch."""
        return self.buffer.sample(self.batch_size // distributed.world_size())

    def begin_update(self) -> None:
        """Step until the next update is due; the last of these steps runs during the update."""
        assert self.collector is not None
        while not self._owes_update(self.collector.is_step_pending):
            if self.collector.is_step_pending:
                self.receive()
                self.check_faults()
            self.send("explore", self._may_pause)

    def end_update(self) -> None:
        """Receive the step that ran during the update, and store its transitions."""
        assert self.collector is not None
        if self.collector.is_step_pending:
            self.receive()
        self.is_busy = False

    def add(self, transitions: Transitions) -> None:
        """Add the transitions to the replay."""
        self.buffer.add(transitions)
        if self._save_replay and not self._has_write_failed:
            with self.stopwatch.measure("checkpoint"):
                self._write(lambda: self._snapshots.write_full_chunk(self.buffer.storage))

    def _owes_update(self, is_step_pending: bool = False) -> bool:
        """Return whether an update is due before the next vector step."""
        counters = self.counters
        num_steps = counters.vector_steps + int(is_step_pending)  # one in flight counts as made
        return self._ratio.due(num_steps, counters.updates)

    @property
    def is_step_finished(self) -> bool:
        """Whether the warm-up is over and all updates of the last vector step have been made."""
        return self._ratio.has_started and not self._owes_update()

    @property
    def last_step(self) -> int:
        """The environment step after which training ends."""
        return self.total_steps + self._refill_steps

    # the buffer and its files

    def open_buffer(self, tasks: Sequence[int], device: torch.device) -> None:
        """Allocate the replay, and print its size."""
        self._snapshots = self._snapshots_in(replay_folder(self.folder))
        policy_fields = self.algorithm.policy_fields
        opened_for = (tuple(tasks), device, tuple(policy_fields))
        if self._opened_for == opened_for:
            return  # a second fit with the same data module continues with its replay
        self._opened_for = opened_for
        if self._memory_map:
            self.folder.mkdir(parents=True, exist_ok=True)
        num_rows = self.capacity // self.num_envs * len(tasks)
        fields = transition_fields(self.spec, policy_fields)
        needed = replay_bytes(self.spec, fields, len(tasks), num_rows // len(tasks))
        wants_device = self._on_device and not self._memory_map
        if not (device.type == "cuda" and wants_device and needed <= free_memory(device) / 2):
            device = CPU
        where = f"in {self.folder}" if self._memory_map else f"on {device}"
        once = ""
        if self.spec.frame_stack:
            stacks = bytes_needed(fields, num_rows)
            once = f", each frame once (as stacks {stacks / 2**20:,.0f} MiB)"
        rank_zero_info(
            f"{distributed.per_rank_prefix()}Replay buffer of {num_rows:,} transitions:"
            f" up to {needed / 2**20:,.0f} MiB {where}{once}"
        )
        self.buffer = ReplayBuffer(
            self.spec,
            num_rows,
            self._seed,
            tasks=tasks,
            folder=self.folder if self._memory_map else None,
            device=device,
            policy_fields=policy_fields,
        )

    def _snapshots_in(self, folder: Path) -> ReplaySnapshots:
        save_last = self._save_last
        if save_last is not None:
            save_last = -(-save_last // distributed.world_size())
        envs = self.envs_of(distributed.rank())
        return ReplaySnapshots(folder, self._chunk_mebibytes, save_last, envs)

    def _write(self, write: Any) -> None:
        """Write ahead of the next checkpoint, which retries if this fails."""
        try:
            write()
        except OSError as error:
            distributed.warn(
                f"the replay could not be written ahead of the next checkpoint: {error}"
            )
            self._has_write_failed = True

    def _save(self) -> dict[str, Any] | None:
        """Write the transitions that a checkpoint needs and that have not been written yet.

        Returns:
            The manifest of the files; None if the replay is not saved.

        Raises:
            OSError: on all processes, if writing fails; existing files stay valid.
        """
        if not self._save_replay:
            return None
        manifest: dict[str, Any] = {}
        with distributed.raise_on_all_ranks(OSError):
            self._write(self._snapshots.finish)
            self._prune()
            manifest = self._snapshots.save(self.buffer.storage)
            manifest["root"] = str(replay_folder(self.folder).resolve())
            self._has_write_failed = False
        return manifest

    def _prune(self) -> None:
        """Delete the files that no checkpoint needs."""
        self._snapshots.prune(needed_manifests(replay_folder(self.folder)))

    def _restore(self, manifest: dict[str, Any] | None) -> None:
        """Restore the replay of the resumed checkpoint, or warn that it is lost."""
        if manifest is None or not self._restore_replay:
            why = "data.restore_replay is false"
            if manifest is None:
                why = "the checkpoint was saved without it (data.save_replay)"
            rank_zero_warn(
                f"the run continues with an empty replay, because {why}: all transitions so far are"
                " lost, new ones are collected before the next update, and results differ from"
                " those of an uninterrupted run"
            )
            return
        assert self.trainer is not None
        storage = self.buffer.storage
        with distributed.raise_on_all_ranks(ConfigurationError):
            snapshots = self._snapshots_in(self._source_of(manifest))
            snapshots.load(manifest, storage)
        if snapshots.folder.resolve() == self._snapshots.folder.resolve():
            self._snapshots = snapshots
        if (storage.oldest_E > np.maximum(storage.added_E - storage.capacity, 0)).any():
            rank_zero_warn(
                f"{distributed.per_rank_prefix()}only the last {len(self.buffer):,} transitions"
                " were saved (data.save_last): the run continues without older ones, and results"
                " differ from those of an uninterrupted run"
            )

    def _source_of(self, manifest: Mapping[str, Any]) -> Path:
        """Return the folder of a manifest's files, in the run folder, which may have been moved."""
        assert self.trainer is not None
        of_checkpoint = replay_folder(Path(str(self.trainer.ckpt_path)).resolve().parent.parent)
        return of_checkpoint if of_checkpoint.is_dir() else Path(manifest["root"])

    def teardown(self, stage: str) -> None:
        """Shut down the workers, and delete files that no checkpoint needs."""
        if stage == "fit" and self._save_replay and hasattr(self, "buffer"):
            self._write(self._snapshots.finish)
            if self._delete_replay and self.is_training:
                self._snapshots_in(self._snapshots.folder).prune([])
                rank_zero_info(
                    f"The replay in {self._snapshots.folder} is deleted"
                    " (data.delete_replay_at_end): this run can only be resumed with"
                    " data.restore_replay false"
                )
            elif not self._has_write_failed:
                # a new object does not track files written ahead of the next checkpoint
                self._snapshots = self._snapshots_in(self._snapshots.folder)
                self._write(self._prune)
        super().teardown(stage)

    # state

    def training_state(self) -> dict[str, Any]:
        """Return the states of environments, schedules and sampling, and the replay's manifest."""
        assert self.collector is not None
        return {
            "collector": self.collector.state_dict(),
            "replay": self._save(),
            "buffer": self.buffer.state_dict(),
            "ratio": self._ratio.state_dict(),
            "refill_steps": self._refill_steps,
        }

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Restore the state; the ratio of updates may differ from the saved run's."""
        assert self.collector is not None and self.trainer is not None
        if len(self.buffer):  # from an earlier fit with the same data module
            self._opened_for = ()
            tasks = self.collector.envs.task_E.tolist()
            self.open_buffer(tasks, self.trainer.strategy.root_device)
        self.collector.load_state_dict(state["collector"])
        self.buffer.load_state_dict(state["buffer"])
        self._ratio.load_state_dict(state["ratio"])
        self._refill_steps = state["refill_steps"]
        if state["ratio"] and state["ratio"]["ratio"] != self._ratio.ratio:
            self._ratio.restart(self.counters.vector_steps, self.counters.updates)
        self._restore(state["replay"])
