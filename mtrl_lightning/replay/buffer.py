"""The replay buffer: equal sampling from every trained task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mtrl_lightning.counters import Stopwatch
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.memory import CPU
from mtrl_lightning.replay.storage import RingStorage, Rows
from mtrl_lightning.types import EnvSpec, TransitionBatch, Transitions


class ReplayBuffer:
    """One ring a trained task; a batch holds the same number of rows of each, drawn independently with replacement.

    Args:
        spec: the tasks trained on (``spec.train_tasks``), shapes and types.
        capacity: transitions of all tasks together, shared out equally.
        seed: of the draws.
        folder: keep the rows in files here, mapped into memory; None for memory.
        device: whose memory, without a folder; batches come on it.

    Raises:
        ConfigurationError: if the capacity gives a task no row, or memory (or disk) is short.
    """

    def __init__(
        self,
        spec: EnvSpec,
        capacity: int,
        seed: int = 0,
        folder: Path | None = None,
        device: torch.device = CPU,
    ) -> None:
        tasks = spec.train_tasks
        if capacity < len(tasks):
            raise ConfigurationError(
                f"capacity is {capacity} for {len(tasks)} tasks: give at least one row a task"
            )
        self.storage = RingStorage(spec, len(tasks), capacity // len(tasks), folder, device)
        self._ring_T = np.full(spec.num_tasks, -1, np.int64)
        self._ring_T[list(tasks)] = np.arange(len(tasks))
        self._task_R = torch.tensor(tasks, dtype=torch.int64, device=device)
        self._first_R1 = torch.arange(len(tasks))[:, None] * self.storage.capacity
        self._generator = torch.Generator().manual_seed(seed)
        self.stopwatch = Stopwatch()

    def __len__(self) -> int:
        """Return the number of transitions held."""
        return int(self.storage.size_R.sum())

    @property
    def capacity(self) -> int:
        """Number of transitions that fit."""
        return self.storage.capacity * self.storage.num_rings

    def add(self, transitions: Transitions) -> None:
        """Remember transitions; those of tasks that are not trained on are left out."""
        ring_E = self._ring_T[transitions.task_E]
        kept = ring_E >= 0
        t = transitions
        fields: tuple[npt.NDArray, ...] = (
            t.observation_ED,
            t.action_EA,
            t.reward_E,
            t.next_observation_ED,
            t.terminated_E,
        )
        if not kept.all():
            ring_E, fields = ring_E[kept], tuple(field[kept] for field in fields)
        self.storage.add(ring_E, fields)

    def sample(self, batch_size: int) -> TransitionBatch:
        """Draw a task-major batch of ``batch_size // R`` rows a task.

        Raises:
            ConfigurationError: if a task has no transition yet.
        """
        size_R = torch.from_numpy(self.storage.size_R)
        num_rings, rows = len(size_R), batch_size // len(size_R)
        if not bool((size_R > 0).all()):
            raise ConfigurationError(
                "a task has no transition to sample: raise rollout.warmup_steps"
            )
        # 53 random bits scaled to each ring's size: every row is equally likely to within 2^-53 * C
        draw_RN = torch.rand(num_rings, rows, generator=self._generator, dtype=torch.float64)
        oldest_R = torch.from_numpy(self.storage.added_R) - size_R
        row_RN = ((draw_RN * size_R[:, None]).long() + oldest_R[:, None]) % self.storage.capacity
        index_B = (row_RN + self._first_R1).flatten()
        drawn: Rows = self.storage.take(index_B)
        return TransitionBatch(
            observation_BD=drawn.observation,
            action_BA=drawn.action,
            reward_B=drawn.reward,
            next_observation_BD=drawn.next_observation,
            terminated_B=drawn.terminated,
            task_B=self._task_R.repeat_interleave(rows),
        )

    def mean_rewards(self) -> npt.NDArray[np.float64]:
        """Return the mean reward of each trained task over what is held, ``[R]``; NaN for a task without any."""
        return self.storage.mean_rewards()

    def state_dict(self) -> dict[str, Any]:
        """Return the generator; the rows are saved by ``ReplaySnapshots``."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generator."""
        self._generator.set_state(state["generator"])
