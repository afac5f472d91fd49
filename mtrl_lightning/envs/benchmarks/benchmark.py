"""A benchmark: named tasks, and an environment for each."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box

from mtrl_lightning.checks import above
from mtrl_lightning.envs.vector.spaces import wrong_actions
from mtrl_lightning.errors import ConfigurationError, name_hint
from mtrl_lightning.spec import EnvSpec, Field, check_train_tasks, known_tasks
from mtrl_lightning.transitions import array_fields


class Benchmark(ABC):
    """Tasks that share an observation and an action space.

    Tasks of different sizes are padded to the largest: ``pad_to_spec`` pads their environments, and
    the spec's ``observation_sizes`` and ``action_sizes`` are each task's own sizes.

    A benchmark is sent to worker processes: it must hold only plain values and functions, and
    import its suite lazily.

    An environment of a task is a ``gymnasium.Env`` whose observation contains no task encoding.

    ``reset(seed=s)`` must determine everything that follows, regardless of earlier episodes.
    ``VectorEnv`` resets every training episode with its own seed, and resumes an episode by
    replaying its actions from its seed. In all other splits, ``s`` is the index of the test
    episode: the same ``s`` always starts the same episode, and each further ``reset()`` the next.
    """

    splits: tuple[str, ...] = ("train", "eval")
    """Names of the splits; the first is used for training, the others for evaluation."""

    def split_tasks(self, split: str) -> tuple[int, ...]:
        """Return the tasks of a split, as indices in ``spec.task_names``; by default all tasks.

        The spec has the tasks of all splits, and its ``train_tasks`` are those of the first split.
        """
        return tuple(range(self.spec.num_tasks))

    @property
    @abstractmethod
    def spec(self) -> EnvSpec:
        """Tasks, spaces and horizon, for algorithms."""

    def horizon_of(self, split: str) -> int:
        """Return the maximum episode length in a split; by default, the spec's horizon."""
        return self.spec.horizon

    @abstractmethod
    def make_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make one environment.

        Args:
            task: the task's index in ``spec.task_names``.
            split: one of ``splits``.
            seed: seed of the environment's random generator, until a reset with another seed.
        """

    def make_rendered_env(self, task: int, split: str, seed: int) -> gym.Env:
        """Make an environment for a video or for ``Pixels``; by default that of ``make_env``.

        It is rendered by its own ``render()`` if its ``render_mode`` is ``rgb_array``, otherwise
        by rendering its MuJoCo simulation (``MjData``) with ``camera``. Its
        ``metadata["render_fps"]`` is the number of steps per second.
        """
        return self.make_env(task, split, seed)

    def camera(self, task: int) -> str | int | None:
        """Return the MuJoCo model's camera for rendering a task; None for its first camera."""
        return None


class BenchmarkWrapper(Benchmark):
    """Base of benchmarks that wrap another one; by default, everything is forwarded.

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
    """A benchmark that also logs numbers reported in ``info``.

    Args:
        benchmark: the tasks.
        keys: keys of numbers in ``info``, which steps may omit.
        store: whether to also store them with the transitions, in single precision, and add them to
            batches as ``batch.extra[key]``. Then every step must report them.
    """

    def __init__(self, benchmark: Benchmark, keys: Sequence[str], store: bool = False) -> None:
        super().__init__(benchmark)
        self.keys = tuple(keys)
        self.store = store
        check_spec(self.spec)

    @property
    def spec(self) -> EnvSpec:
        """The benchmark's spec, with these keys."""
        spec = self.benchmark.spec
        stored = tuple(Field(key) for key in self.keys) if self.store else ()
        return spec._replace(
            info_fields=(*spec.info_fields, *stored),
            info_keys=(*spec.info_keys, *(k for k in self.keys if k not in spec.info_keys)),
        )


class OnlyTasks(BenchmarkWrapper):
    """A benchmark of which only some tasks are evaluated; its spec still has all tasks.

    Args:
        benchmark: the tasks.
        tasks: names of the evaluated tasks, in the order of the results. Splits without any of
            them are omitted.
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
                f"the tasks {', '.join(names)} are in none of the evaluated splits,"
                f" {', '.join(evaluated)}: choose other tasks or another split"
            )
        self.splits = (trained, *with_tasks)

    def split_tasks(self, split: str) -> tuple[int, ...]:
        """Return the selected tasks of a split; for the training split, all of its tasks."""
        of_split = self.benchmark.split_tasks(split)
        if split == self.benchmark.splits[0]:
            return of_split
        return tuple(task for task in self.tasks if task in of_split)


def with_info(benchmark: Benchmark, keys: Sequence[str] | None, store: bool = False) -> Benchmark:
    """Return the benchmark, wrapped to log numbers in ``info`` if there are ``keys``."""
    if store and not keys:
        raise ConfigurationError("data.store_info needs data.info_keys: give the keys to store")
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
    """Return the benchmark's spec with tasks excluded from training.

    Args:
        benchmark: the tasks.
        excluded: names of tasks to exclude from training.
    """
    spec = check_spec(benchmark.spec)
    if not set(spec.train_tasks) <= set(tasks_of(benchmark, benchmark.splits[0])):
        raise ConfigurationError(
            f"the spec's train_tasks are {spec.train_tasks}, but some of them are not in the first"
            f" split of {type(benchmark).__name__}: remove them from train_tasks"
        )
    names = known_tasks(excluded, spec.task_names) if excluded else ()
    trained = tuple(task for task in spec.train_tasks if spec.task_names[task] not in names)
    if not trained:
        raise ConfigurationError("exclude_from_training has every task: keep at least one")
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
    """Return the spec if it is valid, or raise an error."""
    wrong = wrong_actions(spec.action_space)
    if wrong is not None:
        names = ", ".join(spec.task_names)
        raise ConfigurationError(f"the benchmark's spec (tasks {names}): {wrong}")
    space = spec.observation_space
    if not isinstance(space, Box):
        raise ConfigurationError(
            f"the benchmark's observation space is {space}, but must be a Box: wrap the"
            " environments in gymnasium.wrappers.FlattenObservation"
        )
    if not (np.all(spec.action_space.low == -1) and np.all(spec.action_space.high == 1)):
        raise ConfigurationError(
            "actions must lie in [-1, 1]: wrap the environments in gymnasium.wrappers.RescaleAction"
        )
    if spec.is_discrete and sum(spec.action_choices) != spec.action_space.shape[0]:
        raise ConfigurationError(
            f"action_choices is {spec.action_choices}, and the action space has the shape"
            f" {spec.action_space.shape}: give it an entry for each choice"
        )
    check_train_tasks(spec)
    above(0, max_return=spec.max_return, hint=", the largest return of an episode, or None")
    is_stack = space.dtype == np.uint8 and space.shape[:1] == (spec.frame_stack,)
    if spec.frame_stack and not is_stack:
        raise ConfigurationError(
            f"frame_stack is {spec.frame_stack}, but the observation space is {space}: stacked"
            " frames must be unsigned bytes with a first axis of this length; set frame_stack to 0"
        )
    for kind, of_kind in (("observation", space), ("action", spec.action_space)):
        sizes = getattr(spec, f"{kind}_sizes")
        is_vector = len(of_kind.shape) == 1 and len(sizes) == spec.num_tasks
        if sizes and not (is_vector and all(1 <= size <= of_kind.shape[0] for size in sizes)):
            raise ConfigurationError(
                f"{kind}_sizes is {sizes}, but the space has shape {of_kind.shape}: give a size"
                " from 1 to that of the space for each task"
            )
    logged = [name for key in spec.info_keys for name in (key, f"{key}_last")]
    for what, named in (
        ("task_names", spec.task_names),
        ("info_keys (with their _last)", logged),
        ("fields of a step, with info_fields,", [field.name for field in array_fields(spec)]),
    ):
        duplicates = sorted({name for name in named if named.count(name) > 1})
        if duplicates:
            raise ConfigurationError(f"the spec's {what} have duplicates {duplicates}: rename them")
    return spec
