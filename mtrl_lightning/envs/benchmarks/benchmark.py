"""A benchmark: named tasks, and an environment for each."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.checks import above
from mtrl_lightning.envs.vector.shared_arrays import array_fields
from mtrl_lightning.envs.vector.spaces import wrong_actions
from mtrl_lightning.errors import ConfigurationError, name_hint
from mtrl_lightning.spec import EnvSpec, Field, check_train_tasks, known_tasks


class Benchmark(ABC):
    """Tasks that share an observation and an action space.

    Tasks of different sizes share the largest: ``pad_to_spec`` pads their environments, and the
    spec's ``observation_sizes`` and ``action_sizes`` are each task's own sizes.

    A benchmark is sent to worker processes: it holds plain values and functions, and imports its
    suite when it needs it.

    An environment of a task is a ``gymnasium.Env`` whose observation carries no task encoding.

    ``reset(seed=s)`` determines everything that follows, whatever came before. ``VectorEnv`` resets
    every training episode with a seed of its own, and resumes an episode by repeating it from its
    seed and actions. In every other split ``s`` is the number of the test episode: the same ``s``
    always starts the same episode, and each further ``reset()`` the next one.
    """

    splits: tuple[str, ...] = ("train", "eval")
    """Names of the sets of environments; the first is trained on, the others are evaluated."""

    def split_tasks(self, split: str) -> tuple[int, ...]:
        """Return the tasks of a split, as indices in ``spec.task_names``; all of them here.

        The spec has the tasks of all splits, and its ``train_tasks`` are those of the first one.
        """
        return tuple(range(self.spec.num_tasks))

    @property
    @abstractmethod
    def spec(self) -> EnvSpec:
        """Tasks, spaces and horizon, for algorithms."""

    def horizon_of(self, split: str) -> int:
        """Return the largest number of steps of an episode in a split; the spec's horizon here."""
        return self.spec.horizon

    @abstractmethod
    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make one environment.

        Args:
            task: the task's index in ``spec.task_names``.
            split: one of ``splits``.
            seed: of the environment's random generator, until a reset with another seed.
        """

    def make_rendered_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make an environment for a video or for ``Pixels``; by default that of ``make_env``.

        It is drawn by its own ``render()`` if its ``render_mode`` is ``rgb_array``. Else a MuJoCo
        simulation (``MjData``) that it holds is drawn with ``camera``. Its
        ``metadata["render_fps"]`` is the number of its steps in a second.
        """
        return self.make_env(task, split, seed)

    def camera(self, task: int) -> str | int | None:
        """Return the camera of the MuJoCo model that draws a task; None for its first."""
        return None


class BenchmarkWrapper(Benchmark):
    """A benchmark around another one, whose tasks it has; a subclass changes a part of it.

    Args:
        benchmark: the tasks.
    """

    def __init__(self, benchmark: Benchmark) -> None:
        self.benchmark = benchmark
        self.splits = benchmark.splits

    @property
    def spec(self) -> EnvSpec:
        """The benchmark's."""
        return self.benchmark.spec

    def split_tasks(self, split: str) -> tuple[int, ...]:
        """Return the benchmark's tasks of a split."""
        return self.benchmark.split_tasks(split)

    def horizon_of(self, split: str) -> int:
        """Return the benchmark's horizon of a split."""
        return self.benchmark.horizon_of(split)

    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make one of the benchmark's environments."""
        return self.benchmark.make_env(task, split, seed)

    def make_rendered_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make one of the benchmark's environments for a video."""
        return self.benchmark.make_rendered_env(task, split, seed)

    def camera(self, task: int) -> str | int | None:
        """Return the benchmark's camera."""
        return self.benchmark.camera(task)


class WithInfo(BenchmarkWrapper):
    """A benchmark that also logs numbers which its environments report in ``info``.

    Args:
        benchmark: the tasks.
        keys: names in ``info`` of numbers. A step may leave one out.
        store: whether they are also fields of the transitions, in single precision, and in batches
            as ``batch.extra[key]``. Then every step has to report them.
    """

    def __init__(self, benchmark: Benchmark, keys: Sequence[str], store: bool = False) -> None:
        super().__init__(benchmark)
        self.keys = tuple(keys)
        self.store = store
        check_spec(self.spec)

    @property
    def spec(self) -> EnvSpec:
        """The benchmark's, with these numbers."""
        spec = self.benchmark.spec
        stored = tuple(Field(key) for key in self.keys) if self.store else ()
        return spec._replace(
            info_fields=(*spec.info_fields, *stored),
            info_keys=(*spec.info_keys, *(k for k in self.keys if k not in spec.info_keys)),
        )


class OnlyTasks(BenchmarkWrapper):
    """A benchmark of which only some tasks are evaluated; its spec names all of them.

    Args:
        benchmark: the tasks.
        tasks: names of the evaluated ones, in the order of the results. A split that has none of
            them is left out.
    """

    def __init__(self, benchmark: Benchmark, tasks: Sequence[str]) -> None:
        super().__init__(benchmark)
        known = benchmark.spec.task_names
        names = known_tasks(tasks, known)
        self.tasks = tuple(known.index(name) for name in names)
        trained, *evaluated = benchmark.splits
        with_tasks = [split for split in evaluated if self.split_tasks(split)]
        if not with_tasks:
            raise ConfigurationError(
                f"the tasks {', '.join(names)} are in none of the splits"
                f" {', '.join(evaluated)}, which are evaluated: choose other tasks or another split"
            )
        self.splits = (trained, *with_tasks)

    def split_tasks(self, split: str) -> tuple[int, ...]:
        """Return the chosen tasks of a split; all of the split that is trained on."""
        of_split = self.benchmark.split_tasks(split)
        if split == self.benchmark.splits[0]:
            return of_split
        return tuple(task for task in self.tasks if task in of_split)


def with_info(benchmark: Benchmark, keys: Sequence[str] | None, store: bool = False) -> Benchmark:
    """Return the benchmark itself, or one that logs numbers of ``info`` if there are ``keys``."""
    if store and not keys:
        raise ConfigurationError("data.store_info needs data.info_keys: name the keys to store")
    return WithInfo(benchmark, keys, store) if keys else benchmark


def tasks_of(benchmark: Benchmark, split: str) -> tuple[int, ...]:
    """Return the tasks of one of a benchmark's splits."""
    check_split(split, benchmark.splits)
    tasks = tuple(benchmark.split_tasks(split))
    num_tasks = benchmark.spec.num_tasks
    if not tasks or len(set(tasks)) < len(tasks) or not 0 <= min(tasks) <= max(tasks) < num_tasks:
        raise ConfigurationError(
            f"split_tasks({split!r}) of {type(benchmark).__name__} is {tasks}: give each task's"
            f" index in spec.task_names once, from 0 to {num_tasks - 1}, and at least one"
        )
    return tasks


def trained_spec(benchmark: Benchmark, excluded: Sequence[str] | None) -> EnvSpec:
    """Return the benchmark's spec with the tasks that are trained on.

    Args:
        benchmark: the tasks.
        excluded: names of tasks that are left out of those that it trains on.
    """
    spec = check_spec(benchmark.spec)
    if not set(spec.train_tasks) <= set(tasks_of(benchmark, benchmark.splits[0])):
        raise ConfigurationError(
            f"the spec's train_tasks are {spec.train_tasks}, and some of them are not in the first"
            f" split of {type(benchmark).__name__}: leave them out of train_tasks"
        )
    names = known_tasks(excluded, spec.task_names) if excluded else ()
    trained = tuple(task for task in spec.train_tasks if spec.task_names[task] not in names)
    if not trained:
        raise ConfigurationError("exclude_from_training names every task: leave at least one")
    return spec._replace(train_tasks=trained)


def only_split(benchmark: Benchmark, split: str) -> Benchmark:
    """Return the benchmark with a single one of its evaluated splits."""
    trained, *evaluated = benchmark.splits
    check_split(split, evaluated)
    restricted = copy.copy(benchmark)
    restricted.splits = (trained, split)
    return restricted


def check_split(split: str, splits: Sequence[str]) -> None:
    """Check that a split is one of these."""
    if split not in splits:
        raise ConfigurationError(f"unknown split {split!r}: {name_hint(split, splits)}")


def check_spec(spec: EnvSpec) -> EnvSpec:
    """Return the spec if the package can work with it."""
    wrong = wrong_actions(spec.action_space)
    if wrong is not None:
        names = ", ".join(spec.task_names)
        raise ConfigurationError(f"the benchmark's spec (tasks {names}): {wrong}")
    space = spec.observation_space
    if not isinstance(space, Box):
        raise ConfigurationError(
            f"the benchmark's observation space is {space}: observations must be a Box. Wrap the"
            " environments in gymnasium.wrappers.FlattenObservation"
        )
    if not (np.all(spec.action_space.low == -1) and np.all(spec.action_space.high == 1)):
        raise ConfigurationError(
            "actions must lie in [-1, 1]: wrap the environments in gymnasium.wrappers.RescaleAction"
        )
    check_train_tasks(spec)
    above(0, max_return=spec.max_return, hint=", the largest return of an episode, or None")
    is_stack = space.dtype == np.uint8 and space.shape[:1] == (spec.frame_stack,)
    if spec.frame_stack and not is_stack:
        raise ConfigurationError(
            f"frame_stack is {spec.frame_stack}, and the observation space is {space}: stacked"
            " frames are unsigned bytes whose first axis is as long; set frame_stack to 0"
        )
    for kind, of_kind in (("observation", space), ("action", spec.action_space)):
        sizes = getattr(spec, f"{kind}_sizes")
        is_vector = len(of_kind.shape) == 1 and len(sizes) == spec.num_tasks
        if sizes and not (is_vector and all(1 <= size <= of_kind.shape[0] for size in sizes)):
            raise ConfigurationError(
                f"{kind}_sizes is {sizes}, and the space has the shape {of_kind.shape}: give each"
                " of the tasks a size from 1 to that of the space"
            )
    logged = [name for key in spec.info_keys for name in (key, f"{key}_last")]
    for what, named in (
        ("task_names", spec.task_names),
        ("info_keys (with their _last)", logged),
        ("fields of a step, with info_fields,", [field.name for field in array_fields(spec)]),
    ):
        duplicates = sorted({name for name in named if named.count(name) > 1})
        if duplicates:
            raise ConfigurationError(f"the spec's {what} have {duplicates} twice: rename them")
    return spec


def check_same(previous: EnvSpec, changed: EnvSpec) -> None:
    """Check that a benchmark can replace another one under the same algorithm.

    Horizon, success and protocol may differ, and with another horizon also the largest return.
    """
    same = (
        "task_names",
        "observation_space",
        "action_space",
        "info_fields",
        "info_keys",
        "frame_stack",
    )
    differing = [name for name in same if getattr(previous, name) != getattr(changed, name)]
    for kind in ("observation", "action"):
        sizes = [
            [spec.shape_of(kind, task) for task in range(spec.num_tasks)]
            for spec in (previous, changed)
        ]
        if sizes[0] != sizes[1]:
            differing.append(f"{kind}_sizes")
    has_other_score = (previous.max_return is None) != (changed.max_return is None)
    if has_other_score or (
        previous.horizon == changed.horizon and previous.max_return != changed.max_return
    ):
        differing.append("max_return")
    for name in differing:
        raise ConfigurationError(
            f"the new benchmark's {name} is {getattr(changed, name)}, the previous one's"
            f" {getattr(previous, name)}: they must be equal, because the algorithm and its replay"
            " are made for them"
        )
