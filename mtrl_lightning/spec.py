"""The tasks of a benchmark: names, spaces, sizes and protocol.

Shapes: ``T`` tasks, ``R`` trained tasks, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from mtrl_lightning.errors import ConfigurationError, name_hint


class Field(NamedTuple):
    """One column: a number or an array per transition."""

    name: str
    """Name in ``info``, in the storage, in chunk files and in batches."""
    shape: tuple[int, ...] = ()
    """Shape per transition; empty for a number."""
    dtype: str = "float32"
    """Name of the NumPy dtype."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes per transition."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    def stored(self) -> Field:
        """Return the field as it is stored: floating-point numbers in single precision."""
        is_float = np.issubdtype(np.dtype(self.dtype), np.floating)
        return self._replace(dtype="float32") if is_float else self


class EnvSpec(NamedTuple):
    """The description of a benchmark that algorithms, networks and replay receive."""

    task_names: tuple[str, ...]
    """Names of all tasks; a task is identified by its index."""
    observation_space: Box
    """Space of one environment's observation, without any task encoding."""
    action_space: Box
    """Space of one environment's action, bounded by -1 and 1."""
    horizon: int
    """Steps after which an episode is truncated."""
    has_success: bool
    """Whether the environments report ``info["success"]``."""
    train_tasks: tuple[int, ...]
    """Indices of the trained tasks; the others are only evaluated."""
    protocol: Mapping[str, str | int | float]
    """Provenance recorded with every result: versions, reward, horizon, goals."""

    info_fields: tuple[Field, ...] = ()
    """Fields of ``info`` that are stored with transitions."""
    info_keys: tuple[str, ...] = ()
    """Names of numbers in ``info`` whose means are logged."""
    observation_sizes: tuple[int, ...] = ()
    """Size of each task's own observation, which is padded with zeros to the size of the
    observation space. Empty if no task's observation is padded."""
    action_sizes: tuple[int, ...] = ()
    """Size of each task's own action, which is padded with zeros to the size of the action space.
    Empty if no task's action is padded."""
    action_choices: tuple[int, ...] = ()
    """Number of choices of each component of a discrete action, which consists of a one-hot row for
    each component. Empty for continuous actions."""
    observation_parts: tuple[Field, ...] = ()
    """Vector and image of an observation that has both, packed as bytes in this order. Empty for
    other observations."""
    max_return: float | None = None
    """Largest possible episode return, by which a return is divided to get a score. None if the
    benchmark has no score."""
    frame_stack: int = 0
    """Number of stacked frames along the first axis of an observation, newest last; consecutive
    observations overlap, and the replay stores each frame once. 0 without frame stacking."""

    @property
    def is_discrete(self) -> bool:
        """Whether actions are discrete: one-hot rows."""
        return bool(self.action_choices)

    @property
    def num_tasks(self) -> int:
        """Number of all tasks, ``T``."""
        return len(self.task_names)

    @property
    def num_trained(self) -> int:
        """Number of trained tasks, ``R``."""
        return len(self.train_tasks)

    def score(self, return_: float, success: bool) -> float:
        """Return the score of an episode, from 0 to 1.

        This is its success or, for benchmarks without success, its return divided by the largest
        possible one; 0 if there is neither.
        """
        if self.has_success:
            return float(success)
        if self.max_return is None:
            return 0.0
        return min(max(return_ / self.max_return, 0.0), 1.0)

    @property
    def has_score(self) -> bool:
        """Whether episodes have a meaningful ``score``."""
        return self.has_success or self.max_return is not None

    def of_task(self, task: int) -> EnvSpec:
        """Return the spec of a single task, for a network of its own."""
        return self._replace(
            task_names=(self.task_names[task],),
            train_tasks=(0,),
            observation_sizes=self.observation_sizes[task : task + 1],
            action_sizes=self.action_sizes[task : task + 1],
        )

    def shape_of(self, kind: Literal["observation", "action"], task: int) -> tuple[int, ...]:
        """Return the shape of a task's own observation or action, without padding."""
        sizes = self.observation_sizes if kind == "observation" else self.action_sizes
        space = self.observation_space if kind == "observation" else self.action_space
        return (sizes[task],) if sizes else space.shape

    def shapes_of(self, task: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a task's own observation and action, without padding."""
        return self.shape_of("observation", task), self.shape_of("action", task)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as numbers, strings, lists and dictionaries."""
        return {name: _plain(value) for name, value in self._asdict().items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EnvSpec:
        """Build a spec from the values returned by ``to_dict``."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        for name in ("observation_space", "action_space"):
            fields[name] = _box(**values[name])
        for name in ("info_fields", "observation_parts"):
            columns = values.get(name, ())
            fields[name] = tuple(Field(key, tuple(shape), dtype) for key, shape, dtype in columns)
        return cls(**fields)

    @property
    def observation_mask_TD(self) -> npt.NDArray[np.bool_]:
        """False for the padding of each task's observation, ``[T, D]``."""
        return _mask(self.num_tasks, self.observation_space, self.observation_sizes)

    @property
    def action_mask_TA(self) -> npt.NDArray[np.bool_]:
        """False for the padding of each task's action, ``[T, A]``."""
        return _mask(self.num_tasks, self.action_space, self.action_sizes)


def check_train_tasks(spec: EnvSpec) -> None:
    """Check that the trained tasks are in ascending order, as are the groups of a batch."""
    ascending = sorted({*spec.train_tasks} & {*range(spec.num_tasks)})
    if list(spec.train_tasks) != ascending or not ascending:
        raise ConfigurationError(
            f"the spec's train_tasks are {spec.train_tasks} of {spec.num_tasks} tasks: give the"
            " indices of the trained tasks in ascending order, each once"
        )


def pad_to(rows: npt.NDArray, shape: tuple[int, ...]) -> npt.NDArray:
    """Return rows ``[..., *shape]``, with the last axis padded with zeros or cut off."""
    if rows.shape[-len(shape) :] == shape:
        return rows
    (size,) = shape
    padded = np.zeros((*rows.shape[:-1], size), rows.dtype)
    kept = min(size, rows.shape[-1])
    padded[..., :kept] = rows[..., :kept]
    return padded


def _plain(value: Any) -> Any:
    if isinstance(value, Box):
        bounds = {"low": _one_or_all(value.low), "high": _one_or_all(value.high)}
        return {**bounds, "shape": list(value.shape), "dtype": np.dtype(value.dtype).name}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _one_or_all(bound: npt.NDArray) -> Any:
    is_one = bound.size > 0 and bool((bound == bound.flat[0]).all())
    return bound.flat[0].item() if is_one else bound.tolist()


def _box(low: Any, high: Any, shape: Sequence[int], dtype: str) -> Box:
    low, high = (np.broadcast_to(np.asarray(bound, dtype), shape) for bound in (low, high))
    return Box(low, high, tuple(shape), np.dtype(dtype).type)


def _mask(num_tasks: int, space: Box, sizes: Sequence[int]) -> npt.NDArray[np.bool_]:
    if not sizes:
        return np.ones((num_tasks, *space.shape), np.bool_)
    return np.arange(space.shape[0]) < np.array(sizes)[:, None]


def chosen(action_NA: npt.NDArray, choices: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the indices of discrete actions given as rows: of the largest entries.

    Args:
        action_NA: rows of scores, such as one-hot rows.
        choices: number of choices of each component of an action.

    Returns:
        Indices ``[N, components]``, or ``[N]`` for one component.
    """
    parts = np.split(action_NA, np.cumsum(choices)[:-1], axis=-1)
    index_NC = np.stack([part.argmax(-1) for part in parts], -1)
    return index_NC if len(choices) > 1 else index_NC[..., 0]


def one_hot_rows(index_N: npt.NDArray, choices: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return the one-hot rows ``[N, A]`` of the indices that ``chosen`` returns."""
    index_NC = index_N[..., None] if len(choices) == 1 else index_N
    parts = [np.eye(n, dtype=np.float32)[index_NC[..., i]] for i, n in enumerate(choices)]
    return np.concatenate(parts, -1)


def known_tasks(names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Return the full names of tasks, or raise an error if one is unknown or appears twice.

    Args:
        names: names of tasks; a version suffix, such as ``-v3``, is optional if only one version
            is known.
        known: full names.
    """
    names = [_with_version(name, known) for name in names]
    for name in names:
        if name not in known:
            raise ConfigurationError(f"unknown task {name!r}: {name_hint(name, known)}")
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ConfigurationError(f"duplicate tasks {duplicates}: give each task once")
    if not names:
        raise ConfigurationError("the list of tasks is empty: give at least one")
    return tuple(names)


def _with_version(name: str, known: Sequence[str]) -> str:
    """Return the only known version of a task; the name itself if there is not exactly one."""
    versions = [task for task in known if re.fullmatch(re.escape(name) + r"-v\d+", task)]
    return versions[0] if name not in known and len(versions) == 1 else name
