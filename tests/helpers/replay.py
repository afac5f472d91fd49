"""Transitions of which every field carries the same number, so that mixed-up rows are seen."""

import contextlib
import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import RingStorage, Storage
from mtrl_lightning.spec import EnvSpec, Field
from mtrl_lightning.transitions import STORED, TransitionBatch, Transitions, transition_fields
from mtrl_lightning.utils.devices import CPU
from tests.helpers.specs import spec_of

ROW_BYTES = 37
"""Bytes of one transition of ``make_spec``."""
TENSORS = torch.device("cpu", 0)
"""The CPU by a name that replays take for another device, whose memory NumPy cannot write."""


def make_spec(
    num_tasks: int,
    train_tasks: Sequence[int] | None = None,
    dtype: type[np.generic] = np.float32,
    shape: tuple[int, ...] = (3,),
    info_fields: tuple[Field, ...] = (),
) -> EnvSpec:
    low, high = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
    spec = spec_of(num_tasks, Box(low, high, shape, dtype), train_tasks=train_tasks)
    return spec._replace(info_fields=info_fields)


def make_rings(
    num_envs: int,
    capacity: int,
    folder: Path | None = None,
    device: torch.device = CPU,
    **options: Any,
) -> RingStorage:
    fields = transition_fields(make_spec(1, **options))
    return RingStorage(fields, num_envs, capacity, folder, device)


def make_snapshots(
    folder: Path, chunk_rows: float, save_last: int | None = None
) -> ReplaySnapshots:
    """Snapshots whose chunks hold a number of rows."""
    return ReplaySnapshots(folder, chunk_rows * ROW_BYTES / 2**20, save_last)


def encode(ids: Iterable[int]) -> dict[str, np.ndarray]:
    """Columns of the rows with these numbers (below 2^20)."""
    id_N = np.array(list(ids), np.int64)
    observation_ND = id_N[:, None] + np.array([0.0, 0.25, 0.5])
    return {
        "observation": observation_ND,
        "action": np.stack([id_N / 2**20, -id_N / 2**20], axis=1),
        "reward": -2.0 * id_N,
        # the successor of an episode's last row is not the observation of the next row
        "next_observation": observation_ND + 0.125,
        "terminated": id_N % 3 == 0,
    }


def make_transitions(
    ids: Sequence[int], tasks: Sequence[int], envs: Sequence[int] | None = None
) -> Transitions:
    """Make transitions of these tasks; without environments each task has the one of its number."""
    columns = encode(ids)
    return Transitions(
        observation_ED=columns["observation"].astype(np.float32),
        action_EA=columns["action"].astype(np.float32),
        reward_E=columns["reward"].astype(np.float32),
        next_observation_ED=columns["next_observation"].astype(np.float32),
        terminated_E=columns["terminated"],
        truncated_E=np.ones(len(ids), bool),
        task_E=np.array(tasks, np.int64),
        env_E=np.array(tasks if envs is None else envs, np.int64),
    )


def columns_in(batch: TransitionBatch) -> dict[str, Tensor]:
    """Return a batch's columns ``[R, n, ...]`` by name, the further ones last."""
    return dict(zip(STORED, batch[:5], strict=True)) | dict(batch.extra)


def ids_of(batch: TransitionBatch | dict[str, Tensor]) -> np.ndarray:
    """Numbers of all rows, task after task; fails if a row's fields do not belong together."""
    rows = batch
    if isinstance(batch, TransitionBatch):
        rows = {name: column.flatten(0, 1) for name, column in columns_in(batch).items()}
    ids = rows["observation"][:, 0].numpy().astype(np.int64)
    for name, wanted in encode(ids).items():
        assert torch.equal(rows[name], torch.from_numpy(wanted).to(rows[name].dtype)), name
    return ids


def assert_same_columns(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, column in found.items():
        assert column.dtype == wanted[name].dtype, name
        assert torch.equal(column, wanted[name]), name


def assert_same_batch(found: TransitionBatch, wanted: TransitionBatch) -> None:
    assert_same_columns(columns_in(found), columns_in(wanted))
    assert torch.equal(found.task_Rn, wanted.task_Rn)


def newest(storage: Storage, ring: int) -> dict[str, Tensor]:
    """Everything that a ring can give, oldest first."""
    end = int(storage.added_E[ring])
    return storage.take(*storage.numbers(ring, end - int(storage.size_E[ring]), end))


def held(storage: Storage) -> list[list[int]]:
    """Numbers that each ring holds, oldest first."""
    return [ids_of(newest(storage, ring)).tolist() for ring in range(storage.num_envs)]


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    """Let no file of this process grow beyond a size; Python ignores the signal."""
    resource = importlib.import_module("resource")  # Windows has none
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
