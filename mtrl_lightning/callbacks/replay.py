"""Keep the replay on disk for the checkpoints, and read it when a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.callbacks.common import data_of, find
from mtrl_lightning.callbacks.rollout import RolloutCallback
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.datamodule import replay_folder


class ReplayCallback(Callback):
    """Write the replay into ``replay/`` in files that never change, each as soon as it is full.

    A checkpoint then adds the rows of the last, unfinished file only. ``CheckpointCallback``
    decides when, and which files are still needed.

    Args:
        save: whether the replay is saved at all; without it a run that goes on begins with an empty
            one.
        save_last: transitions saved, the newest, over all tasks; null for all.
        chunk_size: transitions in a file, over all tasks.
        restore: whether a run that goes on reads the replay of its checkpoint.

    Raises:
        ConfigurationError: if a number is below 1.
    """

    def __init__(
        self,
        save: bool = True,
        save_last: int | None = None,
        chunk_size: int = 100_000,
        restore: bool = True,
    ) -> None:
        self._save, self._save_last, self._chunk_size, self._restore = (
            save,
            save_last,
            chunk_size,
            restore,
        )
        self._snapshots = ReplaySnapshots(Path("replay"), chunk_size, save_last)
        self._failed = False  # then nothing is written ahead until a save has succeeded
        self._hooked = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the folder; write while environments are stepped, so that no save takes long."""
        if stage == TrainerFn.FITTING:
            assert isinstance(pl_module, Algorithm)
            run_folder = Path(trainer.log_dir or trainer.default_root_dir)
            self._snapshots = ReplaySnapshots(
                replay_folder(run_folder), self._chunk_size, self._save_last
            )
            if self._save and not self._hooked:
                self._hooked = True
                find(trainer, RolloutCallback).after_step.append(
                    lambda _: self._write_ahead(trainer, pl_module)
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the replay of the checkpoint that the run goes on from, or say what is lost without it."""
        if not trainer.ckpt_path:
            return
        data = data_of(trainer)
        assert data.buffer is not None
        if data.manifest is None or not self._restore:
            why = (
                "replay.restore is false"
                if data.manifest
                else "the checkpoint was saved without it (replay.save)"
            )
            rank_zero_warn(
                f"the run goes on with an empty replay, because {why}: all transitions seen so far"
                " are lost, new ones"
                " are collected before the next update, and the run is not the one that it would"
                " have been"
            )
            return
        source = replay_folder(Path(trainer.ckpt_path).resolve().parent.parent)
        snapshots = ReplaySnapshots(source, self._chunk_size, self._save_last)
        snapshots.load(data.manifest, data.buffer.storage)
        if source == self._snapshots.folder.resolve():
            self._snapshots = snapshots
        storage = data.buffer.storage
        if (storage.oldest_R > np.maximum(storage.added_R - storage.capacity, 0)).any():
            rank_zero_warn(
                f"only the last {len(data.buffer):,} transitions were saved (replay.save_last): the"
                " run goes on without"
                " older ones, and is not the one that it would have been"
            )

    def write(self, trainer: Trainer) -> None:
        """Write what the next checkpoint needs.

        Raises:
            OSError: if the disk is full or broken; what was saved before stays whole.
        """
        data = data_of(trainer)
        assert data.buffer is not None
        data.manifest = self._snapshots.save(data.buffer.storage) if self._save else None
        self._failed = False

    def prune(self, manifests: list[dict[str, Any]]) -> None:
        """Delete the files that none of the checkpoints needs."""
        self._snapshots.prune(manifests)

    def _write_ahead(self, trainer: Trainer, algorithm: Algorithm) -> None:
        buffer = data_of(trainer).buffer
        assert buffer is not None
        if self._failed:
            return
        try:
            with algorithm.stopwatch.measure("checkpoint"):
                self._snapshots.write_ahead(buffer.storage)
        except OSError as error:  # the next checkpoint tries again, and has its own rule
            rank_zero_warn(f"the replay could not be written ahead of the next checkpoint: {error}")
            self._failed = True
