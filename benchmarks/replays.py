"""The replays that ``replay`` compares, filled with random transitions of MetaWorld's sizes."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.spaces import Box

from benchmarks.plain_sac import PlainReplay
from benchmarks.updaters import ACTION, OBSERVATION, Work
from mtrl_lightning.errors import import_optional
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.types import Transitions


class Replay(Protocol):
    """What is measured."""

    bytes_per_transition: float

    def add(self) -> None:
        """Add a vector step."""
        ...

    def draw(self) -> Any:
        """Draw a batch, as tensors where they are needed."""
        ...


class OurReplay:
    """``ReplayBuffer``.

    Args:
        work: sizes.
        capacity: transitions held.
    """

    def __init__(self, work: Work, capacity: int) -> None:
        self._work = work
        self._buffer = ReplayBuffer(work.spec, capacity, device=torch.device(work.device))
        tasks = np.arange(work.tasks)
        observation_ED, action_EA, reward_E, next_ED, terminated_E = vector_step(work.tasks)
        self._step = Transitions(
            observation_ED, action_EA, reward_E, next_ED, terminated_E, terminated_E, tasks, tasks
        )
        for _ in range(capacity // work.tasks):
            self._buffer.add(self._step)
        self.bytes_per_transition = (
            bytes_needed(self._buffer.storage.fields, self._buffer.capacity) / self._buffer.capacity
        )

    def add(self) -> None:
        """Add a vector step."""
        self._buffer.add(self._step)

    def draw(self) -> Any:
        """Draw the same number of transitions of every task."""
        return self._buffer.sample(self._work.batch_size)


class SB3Replay:
    """Stable-Baselines3's ``ReplayBuffer``, with the one-hot in the observation.

    Args:
        work: sizes.
        capacity: transitions held.
    """

    def __init__(self, work: Work, capacity: int) -> None:
        kind = import_optional(
            "stable_baselines3", '"mtrl_lightning[bench]"'
        ).common.buffers.ReplayBuffer
        spaces = (
            Box(-np.inf, np.inf, (OBSERVATION + work.tasks,), np.float64),
            Box(-1.0, 1.0, (ACTION,), np.float32),
        )
        self._buffer = kind(capacity, *spaces, device=work.device, n_envs=work.tasks)
        observation_ED, action_EA, reward_E, next_ED, terminated_E = vector_step(
            work.tasks, one_hot=True
        )
        infos: list[dict[str, Any]] = [{} for _ in range(work.tasks)]
        self._step = (observation_ED, next_ED, action_EA, reward_E, terminated_E, infos)
        self._work = work
        for _ in range(capacity // work.tasks):
            self._buffer.add(*self._step)
        arrays = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
        held = self._buffer.buffer_size * work.tasks
        self.bytes_per_transition = (
            sum(getattr(self._buffer, name).nbytes for name in arrays) / held
        )

    def add(self) -> None:
        """Add a vector step."""
        self._buffer.add(*self._step)

    def draw(self) -> Any:
        """Draw from all transitions."""
        return self._buffer.sample(self._work.batch_size)


class RingsReplay:
    """The plain loop's NumPy arrays, with the one-hot in the observation.

    Args:
        work: sizes.
        capacity: transitions held.
    """

    def __init__(self, work: Work, capacity: int) -> None:
        self._buffer = PlainReplay(work.tasks, OBSERVATION + work.tasks, ACTION, capacity)
        self._step = vector_step(work.tasks, one_hot=True)
        self._work = work
        for _ in range(capacity // work.tasks):
            self._buffer.add(*self._step)
        arrays = [value for value in vars(self._buffer).values() if isinstance(value, np.ndarray)]
        self.bytes_per_transition = sum(array.nbytes for array in arrays) / (
            capacity // work.tasks * work.tasks
        )

    def add(self) -> None:
        """Add a vector step."""
        self._buffer.add(*self._step)

    def draw(self) -> Any:
        """Draw the same number of transitions of every task."""
        return self._buffer.sample(self._work.batch_size, self._work.device)


class NaiveReplay:
    """A list of tuples, drawn from and stacked.

    Args:
        work: sizes.
        capacity: transitions held.
    """

    def __init__(self, work: Work, capacity: int) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._next = 0
        self._capacity = capacity
        self._work = work
        self._step = vector_step(work.tasks)
        while len(self._rows) < capacity // work.tasks * work.tasks:
            self.add()
        self.bytes_per_transition = (
            sys.getsizeof(self._rows[0]) + sum(map(sys.getsizeof, self._rows[0])) + 8
        )

    def add(self) -> None:
        """Add a vector step, one transition after the other."""
        for task, fields in enumerate(zip(*self._step, strict=True)):
            row = (*(np.array(field, np.float32) for field in fields), task)
            if len(self._rows) < self._capacity:
                self._rows.append(row)
            else:
                self._rows[self._next] = row
            self._next = (self._next + 1) % self._capacity

    def draw(self) -> Any:
        """Draw from all transitions, and stack."""
        drawn = random.sample(self._rows, self._work.batch_size)
        return [
            torch.as_tensor(np.stack(field), device=self._work.device)
            for field in zip(*drawn, strict=True)
        ]


def vector_step(num_tasks: int, one_hot: bool = False) -> tuple[npt.NDArray, ...]:
    """Return a vector step's columns, with MetaWorld's shapes and types."""
    draws = np.random.default_rng(0)
    observation_ED, next_ED = draws.standard_normal((2, num_tasks, OBSERVATION))
    if one_hot:
        observation_ED, next_ED = (
            np.concatenate([x, np.eye(num_tasks)], 1) for x in (observation_ED, next_ED)
        )
    action_EA = draws.uniform(-1, 1, (num_tasks, ACTION)).astype(np.float32)
    return (
        observation_ED,
        action_EA,
        draws.standard_normal(num_tasks),
        next_ED,
        np.zeros(num_tasks, np.bool_),
    )


def make_replays(kinds: Sequence[str], work: Work, capacity: int) -> dict[str, Replay]:
    """Return filled replays, by the names that the command line knows."""
    known: dict[str, Any] = {
        "ours": OurReplay,
        "sb3": SB3Replay,
        "rings": RingsReplay,
        "naive": NaiveReplay,
    }
    return {kind: known[kind](work, capacity) for kind in kinds}
