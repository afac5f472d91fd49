"""Transitions of which every field carries the same number, so that rows that were mixed up are seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from gymnasium.spaces import Box

from mtrl_lightning.replay.storage import RingStorage, Rows
from mtrl_lightning.types import EnvSpec, TransitionBatch, Transitions

OBSERVATION_DIM, ACTION_DIM = 3, 2


def make_spec(
    num_tasks: int,
    train_tasks: Sequence[int] | None = None,
    dtype: type[np.generic] = np.float32,
    shape: tuple[int, ...] = (OBSERVATION_DIM,),
) -> EnvSpec:
    low, high = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
    return EnvSpec(
        task_names=tuple(f"task-{i}" for i in range(num_tasks)),
        observation_space=Box(low, high, shape, dtype),
        action_space=Box(-1.0, 1.0, (ACTION_DIM,), np.float32),
        horizon=10,
        has_success=True,
        train_tasks=tuple(range(num_tasks)) if train_tasks is None else tuple(train_tasks),
        protocol={"benchmark": "numbers"},
    )


def encode(ids: Iterable[int]) -> tuple[np.ndarray, ...]:
    """Observation, action, reward, next observation and termination of the rows with these numbers (below 2^20)."""
    id_N = np.array(list(ids), np.int64)
    observation_ND = id_N[:, None] + np.array([0.0, 0.25, 0.5])
    action_NA = np.stack([id_N / 2**20, -id_N / 2**20], axis=1)
    # the successor of an episode's last row is not the observation of the next row
    return observation_ND, action_NA, -2.0 * id_N, observation_ND + 0.125, id_N % 3 == 0


def encode_rows(ids: Iterable[int]) -> Rows:
    observation, action, reward, successor, terminated = encode(ids)
    floats = (
        torch.tensor(field, dtype=torch.float32)
        for field in (observation, action, reward, successor)
    )
    return Rows(*floats, torch.tensor(terminated, dtype=torch.bool))


def make_transitions(ids: Sequence[int], tasks: Sequence[int]) -> Transitions:
    observation, action, reward, successor, terminated = encode(ids)
    return Transitions(
        observation_ED=observation.astype(np.float32),
        action_EA=action.astype(np.float32),
        reward_E=reward.astype(np.float32),
        next_observation_ED=successor.astype(np.float32),
        terminated_E=terminated,
        truncated_E=np.ones(len(ids), bool),
        task_E=np.array(tasks, np.int64),
        env_E=np.arange(len(ids)),
    )


def ids_of(batch: TransitionBatch | Rows) -> np.ndarray:
    """Numbers of the rows of a batch; fails if a row's fields do not belong together."""
    observation, action, reward, successor, terminated = batch[:5]
    ids = observation[:, 0].numpy().astype(np.int64)
    for given, wanted in zip(
        (observation, action, reward, successor, terminated), encode_rows(ids), strict=True
    ):
        assert torch.equal(given, wanted)
    return ids


class NaiveRings:
    """What a ``RingStorage`` should hold, as lists of numbers."""

    def __init__(self, num_rings: int, capacity: int) -> None:
        self.rings = [deque(maxlen=capacity) for _ in range(num_rings)]
        self.added = [0] * num_rings

    def add(self, rings: Sequence[int], ids: Sequence[int]) -> None:
        for ring, number in zip(rings, ids, strict=True):
            self.rings[ring].append(number)
            self.added[ring] += 1


class RandomAdditions:
    """An endless source of additions: several rows at once, also of one ring, never more of one than it holds."""

    def __init__(self, num_rings: int, capacity: int, seed: int) -> None:
        self._num_rings, self._capacity = num_rings, capacity
        self._generator = np.random.default_rng(seed)
        self._next_id = 0

    def draw(self, most: int = 10) -> tuple[np.ndarray, list[int]]:
        rings = self._generator.integers(self._num_rings, size=self._generator.integers(most + 1))
        kept = [i for i, ring in enumerate(rings) if (rings[:i] == ring).sum() < self._capacity]
        rings = rings[kept].astype(np.int64)
        ids = list(range(self._next_id, self._next_id + len(rings)))
        self._next_id += len(rings)
        return rings, ids


def held(storage: RingStorage) -> list[list[int]]:
    """Numbers that each ring holds, oldest first."""
    found = []
    for ring in range(storage.num_rings):
        end = int(storage.added_R[ring])
        found.append(
            ids_of(
                storage.take(storage.places(ring, end - int(storage.size_R[ring]), end))
            ).tolist()
        )
    return found
