"""A run's checkpoint files: written durably, read by any number of processes ("ranks")."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.algorithms.state import reshard_extra_states, reshard_state
from mtrl_lightning.checkpoints import check_complete, load_checkpoint, restoring
from mtrl_lightning.checkpoints.parts import RANKS, manifests_of, parts_of, with_part
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.share import Rules, Share, share_of
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.manifest import replay_folder
from mtrl_lightning.run.session import Session


class DurableIO(TorchCheckpointIO):
    """Write a checkpoint to its own folder, and wait for the disk; read this process' part of one.

    Lightning's ``TorchCheckpointIO`` writes to the system's temporary folder first.

    Args:
        session: the run, whose parts reshard the states of another number of processes.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint.

        Raises:
            OSError: if the disk is full or broken.
        """
        with open(path, "wb") as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:
                # after a write that failed, PyTorch's writer also fails when it is closed
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            file.flush()
            os.fsync(file.fileno())

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint as this process has made it, or would have with this number of them.

        Raises:
            ConfigurationError: on all processes, if it is damaged, or of another number of
                processes and cannot be shared out.
        """
        with distributed.raise_on_all_ranks(ConfigurationError):
            checkpoint = load_checkpoint(path, verify=False, mmap=False)
            check_complete(checkpoint)
            self._session.is_restoring = True
            with restoring(path):
                return reshard(
                    checkpoint, distributed.rank(), distributed.world_size(), self._session
                )


def reshard(checkpoint: dict[str, Any], rank: int, size: int, session: Session) -> dict[str, Any]:
    """Return a checkpoint as one of ``size`` ranks would have written it.

    Args:
        checkpoint: a loaded checkpoint, of any number of ranks.
        rank: the rank.
        size: number of ranks of this run.
        session: the run, whose parts split and join their own states.

    Raises:
        ConfigurationError: if the environments cannot be shared out, an on-policy algorithm was in
            the middle of its updates, or the parts are damaged.
    """
    if RANKS not in checkpoint and size == 1:
        return checkpoint
    parts = parts_of(checkpoint)
    if len(parts) == size:
        return with_part(checkpoint, parts[rank])
    share = Share(rank, size, 0, ())  # of an offline algorithm, which has no environments
    if "demonstrations" not in parts[0]["data"]:
        share = share_of([part["collector"]["tasks"] for part in parts], rank, size)
    part = _joined(session, parts, share)
    rank_zero_warn(
        f"the checkpoint is of {len(parts)} processes and this run has {size}: networks,"
        " optimizers, counters, current episodes and the replay are those of the checkpoint, and"
        " random numbers differ from here on. It is not the uninterrupted run"
    )
    return with_part(checkpoint, part)


def _joined(session: Session, parts: Sequence[Mapping[str, Any]], share: Share) -> dict[str, Any]:
    """Return a rank's part of a checkpoint from the parts of all saved ranks."""
    rules: Rules = {
        # an offline algorithm has no environments, and so no state of a collector
        "collector": lambda states: session.collector.reshard(states, share) if states[0] else {},
        "data": partial(session.data.reshard, share=share),
        "algorithm": partial(reshard_state, session.algorithm, share=share),
        "extra_states": partial(reshard_extra_states, session.algorithm, share=share),
    }
    return share.join("a process", parts, rules)


def load_newest_whole(path: Path, with_replay: bool) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint, or the newest complete one of its folder, with a warning.

    The other one is read if the checkpoint or its replay is damaged or missing.

    Args:
        path: the checkpoint to read, ``last.ckpt`` of a run.
        with_replay: whether its replay is needed.

    Raises:
        ConfigurationError: if none is whole.
    """
    errors: list[str] = []
    for candidate in _newest_first(path):
        try:
            checkpoint = load_checkpoint(candidate)
            if with_replay:
                with restoring(candidate):
                    verify_replay(replay_folder(path.resolve().parent.parent), checkpoint)
        except ConfigurationError as error:
            errors.append(str(error))
            continue
        for text in errors:
            rank_zero_warn(text)
        if errors:
            rank_zero_warn(f"GOING BACK to the newest whole checkpoint, {candidate}")
        return candidate, checkpoint
    raise ConfigurationError("\n".join([*errors, f"no checkpoint in {path.parent} is whole"]))


def verify_replay(folder: Path, checkpoint: dict[str, Any]) -> None:
    """Read every replay file that a checkpoint needs, without keeping it.

    Raises:
        ConfigurationError: naming the file, if one is missing or damaged.
    """
    for manifest in manifests_of(checkpoint):
        ReplaySnapshots(folder / manifest.get("folder", "")).verify(manifest)


def _newest_first(path: Path) -> Iterator[Path]:
    yield path
    others = sorted(
        path.parent.glob("step_*.ckpt"), key=lambda other: other.stat().st_mtime_ns, reverse=True
    )
    yield from (other for other in others if not path.is_file() or not other.samefile(path))
