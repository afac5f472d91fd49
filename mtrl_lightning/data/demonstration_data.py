"""The data of an offline algorithm: demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from mtrl_lightning.algorithms.arguments import summary
from mtrl_lightning.data.demonstrations import GIVE, check_identity, load_demonstrations
from mtrl_lightning.data.task_data import ROWS_PER_TASK, TaskData, check_batch_size
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.transitions import TransitionBatch
from mtrl_lightning.utils.devices import CPU


class DemonstrationData(TaskData):
    """Demonstrations of the trained tasks, and batches sampled from them.

    Training steps no environments: each update counts as one environment step in all schedules and
    in the metrics' ``env_steps``.

    Args:
        benchmark: the tasks.
        demonstrations: folder of Minari data sets written by ``collect``, required for training. It
            must contain every trained task, and may contain others.
        total_steps: updates after which training ends; see ``TaskData`` for further options.
        batch_size: global batch size, divided equally among trained tasks and processes. None for
            128 per task.
        on_device: keep the demonstrations in the memory of the training GPU if they take at most
            half of its free memory.
        options: arguments of ``TaskData``.
    """

    kind = "offline"
    buffer: ReplayBuffer
    """The demonstrations, available after ``setup``."""

    def __init__(
        self,
        benchmark: Benchmark,
        demonstrations: str | Path | None = None,
        total_steps: int = 1_000_000,
        batch_size: int | None = None,
        on_device: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(benchmark, total_steps, **options)
        num_tasks = len(self.spec.train_tasks)
        self.demonstrations = demonstrations
        self.batch_size = ROWS_PER_TASK * num_tasks if batch_size is None else batch_size
        check_batch_size(self.batch_size, num_tasks)
        self._on_device = on_device
        self._identity: dict[str, Any] = {}
        """Identity of the demonstrations in the buffer."""

    def setup(self, stage: str) -> None:
        """Read the demonstrations into memory, and print their number."""
        super().setup(stage)
        if stage != "fit":
            return
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        num_tasks = len(self.spec.train_tasks)
        with distributed.raise_on_all_ranks(ConfigurationError):
            check_batch_size(self.batch_size, num_tasks, distributed.world_size())
            if not self._identity:
                self._read(device if self._on_device else CPU)
        for line in (summary(self.algorithm.hyper_parameters), self.algorithm.untrained.summary):
            if line:
                rank_zero_info(line)

    def _read(self, device: torch.device) -> None:
        if self.demonstrations is None:
            raise ConfigurationError(f"data.demonstrations is missing: {GIVE}")
        self.buffer, self._identity = load_demonstrations(
            str(self.demonstrations), self.spec, self._seed, device, self.benchmark.splits[0]
        )
        needed = bytes_needed(self.buffer.storage.fields, self.buffer.capacity)
        rank_zero_info(
            f"Demonstrations in {self.demonstrations}: {len(self.buffer):,} transitions of"
            f" {len(self.spec.train_tasks)} tasks, {needed / 2**20:,.0f} MiB on"
            f" {self.buffer.storage.device}"
        )

    def _batch_rows(self) -> int:
        return self.batch_size

    def begin(self) -> None:
        """Pass the tasks' mean rewards to the algorithm before its first update."""
        self.is_training = True
        if self.counters.updates == 0:
            self.begin_learning()

    def next_batch(self) -> TransitionBatch:
        """Sample this process' share of a batch."""
        return self.buffer.sample(self.batch_size // distributed.world_size())

    def begin_update(self) -> None:
        """Set the algorithm's ``progress``."""
        self.algorithm.progress = min(self.counters.updates / self.total_steps, 1.0)

    def end_update(self) -> None:
        """Count the update as a step of all schedules."""
        counters = self.counters
        self.exchange()
        counters.env_steps = counters.updates
        for call in self.after_step:
            call(counters.env_steps)
        self.is_busy = False

    def training_state(self) -> dict[str, Any]:
        """Return the identity of the demonstrations, and the generator of the batches."""
        return {"demonstrations": self._identity, "buffer": self.buffer.state_dict()}

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Restore the generator."""
        check_identity(state["demonstrations"], self._identity)
        self.buffer.load_state_dict(state["buffer"])
