"""Keep the replay on disk for the checkpoints, and read it when a run is continued."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.checkpoints.parts import MOVED
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.manifest import replay_folder
from mtrl_lightning.run.data import MultiTaskData
from mtrl_lightning.run.kinds import refused_by

CHUNK_MEBIBYTES = 32.0
"""Default size of a file."""


def folder_of_rank() -> str:
    """Return the name of this process' folder in a run's replay folder; empty for one process."""
    return "" if distributed.world_size() == 1 else f"rank_{distributed.rank()}"


class ReplayCallback(SessionCallback):
    """Write the replay into ``replay/`` in files that never change, each as soon as it is full.

    A checkpoint then adds the transitions of the last, unfinished file only. ``CheckpointCallback``
    decides when, and which files are still needed. Of several processes each has its own folder,
    ``replay/rank_0/`` and so on.

    Args:
        save: whether the replay is saved at all; without it a continued run starts with an empty
            one.
        save_last: transitions saved, the newest, over all environments; null for all.
        chunk_mebibytes: size of a file.
        restore: whether a continued run reads the replay of its checkpoint.
        delete_at_end: whether the files are deleted when the run has ended by itself: it can then
            be continued only with ``replay.restore`` false. An interrupted run keeps them.
    """

    key = "replay"

    @refused_by(
        ("on-policy", "offline"),
        "save",
        "save_last",
        "chunk_mebibytes",
        "restore",
        "delete_at_end",
    )
    def __init__(
        self,
        save: bool = True,
        save_last: int | None = None,
        chunk_mebibytes: float = CHUNK_MEBIBYTES,
        restore: bool = True,
        delete_at_end: bool = False,
    ) -> None:
        self._save = save
        self._save_last = save_last
        self._chunk_mebibytes = chunk_mebibytes
        self._restore = restore
        self._delete_at_end = delete_at_end
        self._snapshots = self._snapshots_in(Path("replay"))
        self._has_failed = False  # then no chunk is written until a save has succeeded

    def _snapshots_in(self, folder: Path) -> ReplaySnapshots:
        save_last = self._save_last
        if save_last is not None:
            save_last = -(-save_last // distributed.world_size())
        return ReplaySnapshots(folder, self._chunk_mebibytes, save_last)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the files; write while environments are stepped, so that no save takes long."""
        super().setup(trainer, pl_module, stage)
        if self.session.algorithm.kind != "off-policy":
            return  # an iteration is in the checkpoint itself, demonstrations are in their folder
        if stage == TrainerFn.FITTING and self.session.replay_files is not self:
            folder = replay_folder(self.session.folder) / folder_of_rank()
            self._snapshots = self._snapshots_in(folder)
            self.session.replay_files = self
            if self._save:
                self.session.after_vector_step.append(self._write_full_chunk)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the replay of the checkpoint that is continued, or warn that it is lost."""
        if not trainer.ckpt_path or self.session.algorithm.kind != "off-policy":
            return
        data = self.session.data
        if data.manifest is None or not self._restore:
            why = "replay.restore is false"
            if data.manifest is None:
                why = "the checkpoint was saved without it (replay.save)"
            rank_zero_warn(
                f"the run continues with an empty replay, because {why}: all transitions seen"
                " so far are lost, new ones are collected before the next update,"
                " and the run is not the uninterrupted one"
            )
            return
        folder = replay_folder(Path(trainer.ckpt_path).resolve().parent.parent)
        source = folder / data.manifest.get("folder", "")
        snapshots = self._snapshots_in(source)
        storage = self.session.replay.storage
        if MOVED in data.manifest:  # of a run with another number of processes
            with distributed.raise_on_all_ranks(ConfigurationError):
                for part in data.manifest[MOVED]:
                    of_rank = self._snapshots_in(folder / part["manifest"].get("folder", ""))
                    of_rank.load_rings(part["manifest"], storage, part["rings"])
            return
        with distributed.raise_on_all_ranks(ConfigurationError):
            snapshots.load(data.manifest, storage)
        if source == self._snapshots.folder.resolve():
            self._snapshots = snapshots
        if (storage.oldest_E > np.maximum(storage.added_E - storage.capacity, 0)).any():
            rank_zero_warn(
                f"{distributed.per_rank_prefix()}only the last"
                f" {len(self.session.replay):,} transitions were saved (replay.save_last): the run"
                " continues without older ones, and is not the uninterrupted one"
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Delete the files if that is wanted; an interrupted run does not come here."""
        with self._warning_of_the_disk():
            self._snapshots.finish()
        if not self._delete_at_end:
            return
        folder = self._snapshots.folder
        self._snapshots_in(folder).prune([])
        with contextlib.suppress(OSError):  # only if nothing else is in them
            folder.rmdir()
            if folder_of_rank():
                folder.parent.rmdir()
        rank_zero_info(
            f"The replay in {folder} is deleted (replay.delete_at_end):"
            " continue this run, if at all, with replay.restore false"
        )

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the replay and list its files, whoever saves the checkpoint.

        Raises:
            OSError: if the disk is full or broken; earlier files stay valid.
        """
        if self.session.replay_files is self:
            with distributed.raise_on_all_ranks(OSError):
                self.write()
            checkpoint[MultiTaskData.__qualname__]["replay"] = self.session.data.manifest

    def write(self) -> None:
        """Write the transitions that the next checkpoint needs.

        Raises:
            OSError: if the disk is full or broken; earlier files stay valid.
        """
        with self._warning_of_the_disk():
            self._snapshots.finish()
        data = self.session.data
        storage = self.session.replay.storage
        data.manifest = self._snapshots.save(storage) if self._save else None
        if data.manifest is not None and folder_of_rank():
            data.manifest["folder"] = folder_of_rank()
        self._has_failed = False

    def prune(self, manifests: list[dict[str, Any]]) -> None:
        """Delete the files that none of the checkpoints needs."""
        self._snapshots.prune(manifests)
        if distributed.rank() == 0:
            self._prune_other_ranks(manifests)

    def _prune_other_ranks(self, manifests: list[dict[str, Any]]) -> None:
        """Delete the unneeded files of ranks that this run no longer has."""
        root = replay_folder(self.session.folder)
        size = distributed.world_size()
        present = {"rank_" + str(rank) for rank in range(size)} if size > 1 else {""}
        for folder in (root, *root.glob("rank_*")):
            if ("" if folder == root else folder.name) not in present:
                self._snapshots_in(folder).prune(manifests)
                if folder != root:
                    with contextlib.suppress(OSError):  # only if nothing is in it
                        folder.rmdir()

    def _write_full_chunk(self, env_steps: int) -> None:
        if self._has_failed:
            return
        with self._warning_of_the_disk(), self.session.stopwatch.measure("checkpoint"):
            self._snapshots.write_full_chunk(self.session.replay.storage, wait=False)

    @contextlib.contextmanager
    def _warning_of_the_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # the next checkpoint retries, and has its own rule
            distributed.warn(
                f"the replay could not be written ahead of the next checkpoint: {error}"
            )
            self._has_failed = True
