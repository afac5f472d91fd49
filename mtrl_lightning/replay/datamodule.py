"""The data: a benchmark, what was seen of it, and the stream of batches."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from mtrl_lightning.envs.benchmark import Benchmark, check_spec
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.memory import CPU, free_memory
from mtrl_lightning.replay.buffer import ReplayBuffer
from mtrl_lightning.replay.dataset import ReplayDataset
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.types import EnvSpec, known_tasks

EMPTY: dict[str, Any] = {"capacity": 0, "added": [], "oldest": [], "chunks": []}
"""The manifest of no replay."""


class MultiTaskData(LightningDataModule):
    """A benchmark and the replay of what was seen of it.

    Args:
        benchmark: the tasks, chosen by ``class_path``.
        batch_size: transitions of a batch over all trained tasks; each gets the same number.
        capacity: transitions remembered, over all trained tasks.
        exclude_from_training: names of tasks that are evaluated but never trained on.
        memory_map: keep the replay in a file in the run's folder, mapped into memory, for one
            larger than the memory.
        on_device: keep the replay in the memory of the GPU that trains, if it takes at most half of
            what is free there.
        seed: of the draws from the replay.

    Raises:
        ConfigurationError: if a task is unknown, all are excluded, the batch cannot be shared out
            equally, or the capacity is smaller than a batch.
    """

    def __init__(
        self,
        benchmark: Benchmark,
        batch_size: int = 1280,
        capacity: int = 1_000_000,
        exclude_from_training: list[str] | None = None,
        memory_map: bool = False,
        on_device: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.benchmark = benchmark
        self.batch_size, self.capacity, self._seed = batch_size, capacity, seed
        self._memory_map, self._on_device = memory_map, on_device
        spec = check_spec(benchmark.spec)
        excluded = (
            known_tasks(exclude_from_training, spec.task_names) if exclude_from_training else ()
        )
        trained = tuple(i for i, name in enumerate(spec.task_names) if name not in excluded)
        if not trained:
            raise ConfigurationError("exclude_from_training names every task: leave at least one")
        self.spec: EnvSpec = spec._replace(train_tasks=trained)
        n, rest = divmod(batch_size, len(trained))
        if rest or n < 1:
            near = sorted({max(n, 1) * len(trained), max(n + 1, 1) * len(trained)})
            raise ConfigurationError(
                f"batch_size {batch_size} cannot be shared out equally among {len(trained)} tasks:"
                f" give {' or '.join(map(str, near))}"
            )
        if capacity // len(trained) < n:
            raise ConfigurationError(
                f"capacity {capacity} is smaller than what a batch of {batch_size} needs: give at"
                f" least {batch_size}"
            )
        self.buffer: ReplayBuffer | None = None
        self.manifest: dict[str, Any] | None = None
        """What the last checkpoint that was written or read says of the replay's files; None if they are not saved."""

    def setup(self, stage: str) -> None:
        """Say what memory the replay needs and take it; evaluation needs none."""
        if stage == TrainerFn.FITTING and self.buffer is None:
            rows = self.capacity // len(self.spec.train_tasks) * len(self.spec.train_tasks)
            folder = (
                Path(self.trainer.default_root_dir) if self._memory_map and self.trainer else None
            )
            needed = bytes_needed(self.spec, rows)
            device = self._device_for(needed)
            where = f"disk in {folder}" if folder else f"memory of {device} when full"
            rank_zero_info(f"Replay of {rows:,} transitions: {needed / 2**20:,.0f} MiB of {where}")
            self.buffer = ReplayBuffer(self.spec, self.capacity, self._seed, folder, device)

    def _device_for(self, needed: int) -> torch.device:
        """Return where a replay of so many bytes is kept: on the device that trains, or in the computer's memory."""
        device = self.trainer.strategy.root_device if self.trainer else CPU
        if device.type != "cuda" or self._memory_map or not self._on_device:
            return CPU
        return device if needed <= free_memory(device) / 2 else CPU

    def train_dataloader(self) -> DataLoader:
        """Return the endless stream of batches."""
        assert self.buffer is not None
        warnings.filterwarnings("ignore", "Your `IterableDataset` has `__len__` defined")
        dataset, from_memory = (
            ReplayDataset(self.buffer, self.batch_size),
            self.buffer.storage.device == CPU,
        )
        pinned = (
            from_memory
            and self.trainer is not None
            and self.trainer.strategy.root_device.type == "cuda"
        )
        # a generator of its own, because DataLoader draws a worker seed even without workers
        return DataLoader(dataset, batch_size=None, generator=torch.Generator(), pin_memory=pinned)

    def val_dataloader(self) -> DataLoader | list:
        """Return one empty batch, around which the evaluation callback runs; nothing while fitting."""
        assert self.trainer is not None
        warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
        if self.trainer.state.fn == TrainerFn.FITTING:
            return []
        return DataLoader([0], batch_size=None)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return the manifest of the replay's files and the sampling generator."""
        return (
            {}
            if self.buffer is None
            else {"replay": self.manifest, "buffer": self.buffer.state_dict()}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the manifest and the generator; ``ReplayCallback`` reads the rows."""
        if self.buffer is not None:
            self.manifest = state_dict["replay"]
            self.buffer.load_state_dict(state_dict["buffer"])


def replay_folder(run_folder: Path) -> Path:
    """Return where a run's replay lies."""
    return run_folder / "replay"


def manifest_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of the replay that a checkpoint needs."""
    return checkpoint.get(MultiTaskData.__qualname__, {}).get("replay") or EMPTY
