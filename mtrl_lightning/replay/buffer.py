"""The replay buffer: equal sampling from every trained task.

Shapes: ``R`` trained tasks, ``M`` rings of a task, ``n`` rows of a task in a batch, ``E``
environments (rings), ``B = R * n`` all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.checkpoints import PER_RANK
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay.frames import FrameStorage
from mtrl_lightning.replay.storage import RingStorage, Storage
from mtrl_lightning.spec import EnvSpec, Field
from mtrl_lightning.transitions import TransitionBatch, Transitions, transition_fields
from mtrl_lightning.utils.devices import CPU

CORE = tuple(name.rsplit("_", 1)[0] for name in TransitionBatch._fields)
"""Fields of the schema that are attributes of ``TransitionBatch``."""


class ReplayBuffer:
    """Ring buffer per environment; a batch has the same number of rows of every trained task.

    A task's rows are sampled independently, with replacement, and uniformly over all transitions
    in its environments' rings.

    Args:
        spec: the trained tasks (``spec.train_tasks``), shapes and dtypes.
        capacity: total capacity in transitions, divided equally among environments.
        seed: seed of the sampling, which differs between processes.
        tasks: the task of each environment; None for one environment per trained task.
        folder: folder of memory-mapped files for the transitions; None to keep them in memory.
        device: device of the transitions, without a folder, and of the batches.
        policy_fields: further fields of a transition, returned by the policy's ``act``.
        storage: factory of the storage, ``(fields, num_envs, capacity, folder, device)``; None
            to store each stacked frame once, and all other fields unchanged.
    """

    def __init__(
        self,
        spec: EnvSpec,
        capacity: int,
        seed: int = 0,
        *,
        tasks: Sequence[int] | None = None,
        folder: Path | None = None,
        device: torch.device = CPU,
        policy_fields: Sequence[Field] = (),
        storage: Callable[..., Storage] | None = None,
    ) -> None:
        task_E = np.asarray(spec.train_tasks if tasks is None else tasks, np.int64)
        assert set(task_E.tolist()) == set(spec.train_tasks), "tasks must be the trained tasks"
        if capacity < len(task_E):
            raise ConfigurationError(
                f"capacity is {capacity} for {len(task_E)} environments:"
                " give at least one transition per environment"
            )
        fields = transition_fields(spec, policy_fields)
        make = make_storage(spec) if storage is None else storage
        self.storage = make(fields, len(task_E), capacity // len(task_E), folder, device)
        self._ring_RM, self._is_ring_RM = _rings_of_tasks(task_E, spec.train_tasks)
        self._task_R = torch.tensor(spec.train_tasks, dtype=torch.int64, device=device)
        self._generator = torch.Generator().manual_seed(distributed.seed_of_rank(seed))

    def __len__(self) -> int:
        """Return the number of stored transitions."""
        return int(self.storage.size_E.sum())

    @property
    def capacity(self) -> int:
        """Maximum number of transitions."""
        return self.storage.capacity * self.storage.num_envs

    @property
    def guaranteed_size(self) -> int:
        """Minimum number of transitions that a full buffer stores.

        With stacked frames, short episodes need more frames per transition.
        """
        return self.storage.guaranteed_size * self.storage.num_envs

    def add(self, transitions: Transitions) -> None:
        """Add transitions to the rings given by ``env_E``."""
        self.storage.add(transitions.env_E, transitions.columns())

    def sample(self, batch_size: int) -> TransitionBatch:
        """Sample ``batch_size // R`` rows of each trained task."""
        num_rows = batch_size // len(self._task_R)
        env_B, number_B = self._sample_rows(num_rows)
        rows = self.storage.take(env_B, number_B)
        return batch_of(rows, self._task_R)

    def _sample_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Sample ring and number of ``num_rows`` transitions of each trained task, ``[B]`` each."""
        sizes = self.storage.size_E
        size_E = torch.from_numpy(sizes)
        oldest_E = torch.from_numpy(self.storage.added_E - sizes)
        # concatenate a task's M rings: ring m ends at the cumulative sum of the sizes up to m
        size_RM = torch.where(self._is_ring_RM, size_E[self._ring_RM], 0)
        end_RM = size_RM.cumsum(1)
        total_R1 = end_RM[:, -1:]
        if not bool((total_R1 > 0).all()):
            raise ConfigurationError("a task has no transitions to sample: raise data.warmup_steps")
        # 53 random bits scaled to a task's transitions: uniform within 2^-53
        uniform_Rn = torch.rand(
            len(total_R1),
            num_rows,
            generator=self._generator,
            dtype=torch.float64,
        )
        index_Rn = (uniform_Rn * total_R1).long()
        # ring and offset of indices into a task's concatenated rings
        which_Rn = torch.searchsorted(end_RM, index_Rn, right=True)
        env_Rn = self._ring_RM.gather(1, which_Rn)
        # position in its own ring, counted from the oldest transition
        offset_Rn = index_Rn - (end_RM - size_RM).gather(1, which_Rn)
        return env_Rn.flatten(), (oldest_E[env_Rn] + offset_Rn).flatten()

    def mean_rewards(self) -> npt.NDArray[np.float64]:
        """Return the mean reward of each trained task in the replay, ``[R]``; NaN if it has none.

        With several processes, the mean is taken over all of their replays.
        """
        ring_RM = self._ring_RM.numpy()
        is_ring_RM = self._is_ring_RM.numpy()
        sum_R = np.where(is_ring_RM, self.storage.reward_sums()[ring_RM], 0.0).sum(1)
        size_R = np.where(is_ring_RM, self.storage.size_E[ring_RM], 0).sum(1)
        sum_R = np.sum(distributed.gather(sum_R), axis=0)
        size_R = np.sum(distributed.gather(size_R), axis=0)
        with np.errstate(invalid="ignore"):
            return sum_R / size_R

    def state_dict(self) -> dict[str, Any]:
        """Return the generator; the transitions are saved by ``ReplaySnapshots``."""
        return {PER_RANK: {distributed.rank(): self._generator.get_state()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generator; a new process has none to restore."""
        own = state[PER_RANK].get(distributed.rank())
        if own is not None:
            self._generator.set_state(own.cpu())


def batch_of(rows: Mapping[str, Tensor], task_R: Tensor) -> TransitionBatch:
    """Return columns ``[R * n, ...]``, grouped by task, as a batch.

    Args:
        rows: columns by their names in the schema.
        task_R: the trained tasks.
    """
    columns = {name: column.unflatten(0, (len(task_R), -1)) for name, column in rows.items()}
    return TransitionBatch(
        observation_RnD=columns["observation"],
        action_RnA=columns["action"],
        reward_Rn=columns["reward"],
        next_observation_RnD=columns["next_observation"],
        terminated_Rn=columns["terminated"],
        task_Rn=task_R[:, None].expand(columns["reward"].shape),
        extra={name: column for name, column in columns.items() if name not in CORE},
    )


def _rings_of_tasks(task_E: npt.NDArray[np.int64], tasks: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the rings of each task ``[R, M]``, and a mask of valid entries of the same shape."""
    rings = [np.flatnonzero(task_E == task) for task in tasks]
    most = max(len(ring) for ring in rings)
    ring_RM = np.zeros((len(tasks), most), np.int64)
    is_ring_RM = np.zeros((len(tasks), most), np.bool_)
    for row, ring in enumerate(rings):
        ring_RM[row, : len(ring)] = ring
        is_ring_RM[row, : len(ring)] = True
    return torch.from_numpy(ring_RM), torch.from_numpy(is_ring_RM)


def make_storage(spec: EnvSpec) -> Callable[..., Storage]:
    """Return the factory of a benchmark's storage, ``(fields, num_envs, capacity, ...)``.

    Stacked frames are stored once each, other fields unchanged.
    """
    if spec.frame_stack:
        return partial(FrameStorage, horizon=spec.horizon)
    return RingStorage
