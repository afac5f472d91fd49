"""Writing and reading a run's checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.checkpoints import (
    RANKS,
    check_complete,
    data_key,
    gathered,
    load_checkpoint,
    manifest_of,
    of_absent_ranks,
    of_envs,
    part_of,
    restoring,
    with_part,
)
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay.index import note_checkpoint, replay_folder
from mtrl_lightning.spec import EnvSpec

if TYPE_CHECKING:
    from mtrl_lightning.data.task_data import TaskData


class RunIO(TorchCheckpointIO):
    """Write checkpoints durably, with the replay files they need, and read this process' part.

    Args:
        data: the run's data module, which assigns environments to processes.
    """

    def __init__(self, data: TaskData) -> None:
        super().__init__()
        self._data = data
        self._absent: dict[str, Any] = {}
        """States in the resumed checkpoint of ranks that no longer exist."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint atomically: it replaces ``path`` only when it is complete.

        No checkpoint is written if an exception has ended the run in the middle of an update.

        Raises:
            OSError: if writing fails; an existing file is kept.
        """
        path = Path(path)
        if "data" in checkpoint["mtrl_lightning"]:
            if checkpoint.get(data_key(checkpoint), {}).get("is_busy"):
                rank_zero_warn(f"{path} not written: the run ended in the middle of an update")
                return
            parts = checkpoint.pop(RANKS, None) or [part_of(checkpoint)]
            envs = [self._data.envs_of(rank) for rank in range(len(parts))]
            checkpoint = with_part(checkpoint, gathered(parts, envs, self._absent))
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            _write(checkpoint, unfinished)
            # before the checkpoint, so that a kill in between cannot leave it without its files
            note_checkpoint(replay_folder(self._data.folder), path, manifest_of(checkpoint))
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint; to resume the run, with the states of this process' environments.

        No code in it is executed.
        """
        with distributed.raise_on_all_ranks(ConfigurationError):
            checkpoint = load_checkpoint(path, mmap=False)
            assert self._data.trainer is not None
            is_fitting = self._data.trainer.state.fn == "fit"
            if is_fitting:
                check_complete(checkpoint)
            with restoring(path):
                _check_protocol(checkpoint, self._data.spec, is_fitting)
                of_data = checkpoint["mtrl_lightning"].get("data") == type(self._data).__qualname__
                return self._own(checkpoint) if is_fitting and of_data else checkpoint

    def _own(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint with only the states of this process' environments."""
        saved_size = checkpoint["mtrl_lightning"]["num_processes"]
        size = distributed.world_size()
        if saved_size != size:
            rank_zero_warn(
                f"the checkpoint was saved by {saved_size} processes, but this run has {size}:"
                " networks, optimizers, counters, current episodes and the replay are restored, but"
                " random numbers, and thus results, differ from those of an uninterrupted run"
            )
        part = part_of(checkpoint)
        self._absent = of_absent_ranks(part, size)
        num_envs = sum(len(self._data.envs_of(rank)) for rank in range(size))
        return with_part(
            checkpoint, of_envs(part, self._data.envs_of(distributed.rank()), num_envs)
        )


def _check_protocol(checkpoint: Mapping[str, Any], spec: EnvSpec, is_fitting: bool) -> None:
    """Check that a checkpoint has this run's protocol; for evaluation, only warn."""
    saved = checkpoint["mtrl_lightning"]["spec"]["protocol"]
    differences = [
        f"{key} {saved.get(key)} instead of {spec.protocol.get(key)}"
        for key in dict.fromkeys([*saved, *spec.protocol])
        if saved.get(key) != spec.protocol.get(key)
    ]
    if not differences:
        return
    text = f"the checkpoint was trained with another protocol: {', '.join(differences)}"
    if is_fitting:
        raise ConfigurationError(f"{text}; use the config.yaml in its run's folder")
    rank_zero_warn(text)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        try:
            torch.save(checkpoint, file)
        except RuntimeError as error:
            # after a failed write, closing PyTorch's writer fails, too
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
