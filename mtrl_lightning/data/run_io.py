"""How a run's checkpoints are written and read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.algorithms.state import reshard_extra_states, reshard_state
from mtrl_lightning.checkpoints import check_complete, load_checkpoint, restoring
from mtrl_lightning.checkpoints.parts import RANKS, data_key, manifests_of, parts_of, with_part
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.share import Rules, Share, share_of
from mtrl_lightning.replay.index import note_checkpoint
from mtrl_lightning.replay.manifest import replay_folder
from mtrl_lightning.spec import EnvSpec

if TYPE_CHECKING:
    from mtrl_lightning.data.task_data import TaskData


class RunIO(TorchCheckpointIO):
    """Write checkpoints durably, note the replay files that they need, and read this process' part.

    Args:
        data: of the run, whose parts reshard the states of another number of processes.
    """

    def __init__(self, data: TaskData) -> None:
        super().__init__()
        self._data = data

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint; it has its name only when it is complete and on the disk.

        One of a run that an exception has ended in the middle of an update is left out.

        Raises:
            OSError: if the disk is full or broken; a previous file of that name stays.
        """
        path = Path(path)
        manifests: list[dict[str, Any]] = []
        if "data" in checkpoint["mtrl_lightning"]:
            if checkpoint.get(data_key(checkpoint), {}).get("is_busy"):
                rank_zero_warn(f"{path} is not written: the run ended in the middle of an update")
                return
            manifests = manifests_of(checkpoint)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            _write(checkpoint, unfinished)
            # before the file: a kill between the two leaves no checkpoint without its files
            note_checkpoint(replay_folder(self._data.folder), path, manifests)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint as this process has made it, or would have with this number of them.

        Nothing in it is executed.

        Raises:
            ConfigurationError: on all processes, if it is damaged, or of another number of
                processes and cannot be divided among these.
        """
        with distributed.raise_on_all_ranks(ConfigurationError):
            checkpoint = load_checkpoint(path, mmap=False)
            assert self._data.trainer is not None
            is_fitting = self._data.trainer.state.fn == "fit"
            if is_fitting:
                check_complete(checkpoint)
            with restoring(path):
                _check_protocol(checkpoint, self._data.spec, is_fitting)
                return reshard(checkpoint, self._data)


def _check_protocol(checkpoint: Mapping[str, Any], spec: EnvSpec, is_fitting: bool) -> None:
    """Check that a checkpoint is of the protocol of this run; to evaluate, warn if it is not.

    Raises:
        ConfigurationError: naming both sides of a difference.
    """
    saved = checkpoint["mtrl_lightning"]["spec"]["protocol"]
    differences = [
        f"{key} {saved.get(key)} there and {spec.protocol.get(key)} here"
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
            # after a write that failed, PyTorch's writer also fails when it is closed
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def reshard(checkpoint: dict[str, Any], data: TaskData) -> dict[str, Any]:
    """Return a checkpoint as this rank would have written it.

    Args:
        checkpoint: a loaded checkpoint, of any number of ranks.
        data: of the run, whose parts split and join their own states.

    Raises:
        ConfigurationError: if the environments cannot be divided, an on-policy algorithm was in
            the middle of its updates, or the parts are damaged.
    """
    rank, size = distributed.rank(), distributed.world_size()
    if RANKS not in checkpoint and size == 1:
        return checkpoint
    parts = parts_of(checkpoint)
    if len(parts) == size:
        return with_part(checkpoint, parts[rank])
    assert data.trainer is not None
    if data.trainer.state.fn != "fit":
        return with_part(checkpoint, parts[0])
    share = Share(rank, size, 0, ())  # of an offline algorithm, which has no environments
    if "collector" in parts[0]["data"]:
        share = share_of([part["data"]["collector"]["tasks"] for part in parts], rank, size)
    rank_zero_warn(
        f"the checkpoint is of {len(parts)} processes and this run has {size}: networks,"
        " optimizers, counters, current episodes and the replay are those of the checkpoint, and"
        " random numbers differ from here on. It is not the uninterrupted run"
    )
    return with_part(checkpoint, _joined(data, parts, share))


def _joined(data: TaskData, parts: Sequence[Mapping[str, Any]], share: Share) -> dict[str, Any]:
    """Return a rank's part of a checkpoint from the parts of all saved ranks."""
    rules: Rules = {
        "data": partial(data.reshard, share=share),
        "algorithm": partial(reshard_state, data.algorithm, share=share),
        "extra_states": partial(reshard_extra_states, data.algorithm, share=share),
    }
    return share.join("a process", parts, rules)
