"""A collection of whole episodes on disk: its transitions, its tasks and how it was made.

A collection is a folder with ``collection.json`` and the replay files of one ring in ``replay/``,
each with its checksum. Nothing in it is executed.

Shapes: ``N`` transitions, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mtrl_lightning.demonstrations.minari_files import (
    EXTRA,
    check_memory,
    check_minari,
    data_files,
    open_data_sets,
    write_columns,
)
from mtrl_lightning.errors import ConfigurationError, import_optional, installed_versions
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.manifest import HINT, replay_folder
from mtrl_lightning.replay.storage import Columns, RingStorage
from mtrl_lightning.rollout.matching import own_shape
from mtrl_lightning.runs import ensure_writable
from mtrl_lightning.saved_spec import describe_spec, rebuild_spec
from mtrl_lightning.schema import transition_fields
from mtrl_lightning.spec import EnvSpec, Field

FILE = "collection.json"
FORMAT = 1
"""Version of the format."""
MAY_DIFFER = (
    "horizon",
    "evaluation_horizon",
    "frames",
    "num_goals",
    "goal_seed",
    "mujoco",
)
"""Entries of a protocol in which a collection may differ from the benchmark that it is used in."""
PACKAGES = ("mtrl_lightning", "metaworld", "mujoco", "gymnasium", "numpy", "torch")
"""Packages whose versions are recorded."""
_DAMAGED = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError)
"""What values of other types than expected raise, beside ``ValueError``."""


@dataclass(frozen=True)
class Collection:
    """Whole episodes of a benchmark's tasks."""

    folder: Path
    spec: EnvSpec
    """Tasks and spaces of the benchmark in which it was collected."""
    columns: dict[str, npt.NDArray]
    """By name, one row per transition: ``observation`` ``[N, D]``, ``action`` ``[N, A]``,
    ``reward``, ``next_observation``, ``terminated``, ``truncated``, ``success`` (in this step; if
    the benchmark has it, and not of an exported replay), ``task`` (index in ``spec.task_names``),
    ``episode`` and the spec's ``info_fields``. The rows of an episode follow one another, and
    episodes are numbered from 0. Floating-point numbers are of single precision."""
    facts: dict[str, Any]
    """How it was made: ``benchmark``, ``policy``, ``seed``, ``split``, ``versions`` of packages;
    ``episodes`` and ``successes`` of each task by its name; further values that the writer gave."""

    @property
    def num_transitions(self) -> int:
        """Number of rows, ``N``."""
        return len(self.columns["episode"])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a row of each column."""
        return {name: column.shape[1:] for name, column in self.columns.items()}

    @property
    def episodes(self) -> dict[str, int]:
        """Number of episodes of each task by its name."""
        return counts_of(self.columns, self.spec)["episodes"]


class CollectionFiles:
    """A collection on the disk, which is read chunk by chunk.

    Args:
        folder: where it is.
        spec: of the benchmark in which it was collected.
        facts: as in ``Collection``.
        fields: its columns.
        read: returns the columns of one chunk after another, each time from the first one on.

    Raises:
        ConfigurationError: if its files are damaged, or its rows are no whole episodes.
    """

    def __init__(
        self,
        folder: Path,
        spec: EnvSpec,
        facts: Mapping[str, Any],
        fields: Sequence[Field],
        read: Callable[[], Iterator[Columns]],
    ) -> None:
        self.folder = folder
        self.spec = spec
        self.fields = tuple(fields)
        self._read = read
        counted = _EpisodeCounts(spec)
        for columns in self.chunks():
            with _reading(folder):
                _check_numbers(columns, spec)
                counted.add(columns)
        with _reading(folder):
            counted.check_end()
        self.facts = dict(facts)
        """As in ``Collection``."""
        self.rows = dict(zip(spec.task_names, counted.rows_T.tolist(), strict=True))
        """Number of transitions of each task by its name."""
        self.shortest = dict(zip(spec.task_names, counted.shortest_T.tolist(), strict=True))
        """Steps of the shortest episode of each task that has one."""
        self.counts = counted.named()
        """Number of episodes of each task, and that of successful ones, by its name."""

    @property
    def episodes(self) -> dict[str, int]:
        """Number of episodes of each task by its name."""
        return self.counts["episodes"]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a row of each column."""
        return {field.name: field.shape for field in self.fields}

    def chunks(self) -> Iterator[Columns]:
        """Return the columns of some rows after another, as in ``Collection``.

        Raises:
            ConfigurationError: if a file is damaged, or does not fit into memory.
        """
        with _reading(self.folder):
            yield from self._read()


def collection_fields(spec: EnvSpec) -> tuple[Field, ...]:
    """Return the columns that every collection of a benchmark has."""
    success = (Field("success", (), "bool"),) if spec.has_success else ()
    return (
        *transition_fields(spec),
        Field("truncated", (), "bool"),
        *success,
        Field("task", (), "int64"),
        Field("episode", (), "int64"),
    )


def check_free(folder: Path) -> None:
    """Check that a collection can be written to a folder.

    Raises:
        ConfigurationError: if the folder has files already, cannot be written, or cannot be
            replaced by a finished one: the working directory, a symbolic link or a mount point.
    """
    is_other = folder.is_symlink() or os.path.ismount(folder)
    if is_other or Path.cwd().is_relative_to(folder.resolve()):
        what = "a symbolic link or a mount point" if is_other else "the working directory"
        raise ConfigurationError(
            f"--folder {folder} is {what}, which cannot be replaced: give a new folder in it, such"
            f" as {folder / 'collection'}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "holds another collection" if (folder / FILE).exists() else "is not empty"
        raise ConfigurationError(f"{folder} {what}: delete it, or give another --folder")
    parents = folder.resolve().parents
    ensure_writable(next(parent for parent in parents if parent.exists()))


def write_collection(
    folder: str | Path,
    spec: EnvSpec,
    columns: Mapping[str, npt.NDArray],
    facts: Mapping[str, Any],
    to: Literal["replay", "minari"] = "replay",
) -> dict[str, Any]:
    """Write a collection; the folder has its name only when everything is on the disk.

    Args:
        folder: new, or empty.
        spec: of the benchmark.
        columns: as in ``Collection``; further ones are written, too.
        facts: plain values; the versions of packages, and each task's episodes and successes are
            added.
        to: ``replay`` for ``collection.json`` and replay files, ``minari`` for a data set of each
            task, of which the folder is Minari's ``MINARI_DATASETS_PATH``.

    Returns:
        All facts.

    Raises:
        ConfigurationError: if the folder has files already, or cannot be written, memory is short,
            or Minari is not installed. If the folder cannot be replaced at the end, the error names
            where the collection is.
        OSError: if the disk is full or broken.
    """
    folder = Path(folder)
    check_free(folder)
    if to == "minari":
        check_minari()
    fields = list(collection_fields(spec))
    known = {field.name for field in fields}
    fields += [
        Field(name, column.shape[1:], column.dtype.name).stored()
        for name, column in columns.items()
        if name not in known
    ]
    stored = {field.name: np.asarray(columns[field.name], field.dtype) for field in fields}
    _check_numbers(stored, spec)
    facts = {**facts, **counts_of(stored, spec), "versions": installed_versions(PACKAGES)}
    beside = folder.resolve().parent
    beside.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=beside, prefix=".unfinished_"))
    finished = temporary / "collection"
    try:
        finished.mkdir()
        if to == "minari":
            write_columns(finished, spec, stored, facts)
        else:
            _write_files(finished, spec, fields, stored, facts)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    try:
        os.replace(finished, folder)
    except OSError as error:  # collecting again may take hours
        raise ConfigurationError(
            f"the collection is complete but cannot be moved to {folder} ({error}): it is in"
            f" {finished}; move it to a new folder"
        ) from error
    temporary.rmdir()
    return facts


def _write_files(
    folder: Path,
    spec: EnvSpec,
    fields: Sequence[Field],
    columns: Mapping[str, npt.NDArray],
    facts: Mapping[str, Any],
) -> None:
    num_rows = len(columns["episode"])
    storage = RingStorage(fields, 1, num_rows)
    storage.add(np.zeros(num_rows, np.int64), columns)
    manifest = ReplaySnapshots(replay_folder(folder)).save(storage)
    content = {"format": FORMAT, "spec": describe_spec(spec), "facts": facts, "replay": manifest}
    (folder / FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")


def counts_of(columns: Columns, spec: EnvSpec) -> dict[str, dict[str, int]]:
    """Return the number of episodes of each task by name, and that of successful ones.

    Raises:
        ValueError: if the rows are not whole episodes, one after another, each of one task.
    """
    counted = _EpisodeCounts(spec)
    counted.add(columns)
    counted.check_end()
    return counted.named()


def read_collection(path: str | Path) -> Collection:
    """Read a collection into memory.

    Args:
        path: as of ``open_collection``.

    Raises:
        ConfigurationError: as ``open_collection`` does, or if it does not fit into memory.
    """
    files = open_collection(path)
    num_rows = sum(files.rows.values())
    with _reading(files.folder):
        check_memory(num_rows * sum(field.num_bytes for field in files.fields))
    columns = {
        field.name: np.empty((num_rows, *field.shape), field.dtype) for field in files.fields
    }
    end = 0
    for chunk in files.chunks():
        start, end = end, end + len(chunk["episode"])
        for name, column in columns.items():
            column[start:end] = chunk[name]
    return Collection(files.folder, files.spec, columns, files.facts)


def open_collection(path: str | Path) -> CollectionFiles:
    """Read a collection once, without keeping it.

    Args:
        path: the folder of a collection, or of Minari data sets that ``collect --to minari`` or
            ``export --to minari`` has written. Those of a run's replay have no success.

    Raises:
        ConfigurationError: if there is none, a file of it is missing or damaged, or a field of a
            Minari file; or if h5py is not installed, which these need.
    """
    path = Path(path)
    if (path / FILE).is_file():
        with _reading(path):
            parts = _open_files(path)
        return CollectionFiles(path, *parts)
    if data_files(path):
        import_optional("h5py", f'"mtrl_lightning{EXTRA}"')
        with _reading(path):
            spec, facts, fields, read = open_data_sets(path)
        files = CollectionFiles(path, spec, facts, fields, read)
        files.facts |= files.counts
        return files
    raise ConfigurationError(
        f"{path} is no collection: it has no {FILE} and no data set of Minari. Give the folder that"
        " mtrl-lightning collect or export --to minari has written"
    )


def _open_files(
    folder: Path,
) -> tuple[EnvSpec, dict[str, Any], list[Field], Callable[[], Iterator[Columns]]]:
    content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if content["format"] != FORMAT:
        raise ConfigurationError(
            f"it has the format {content['format']}, and this version reads {FORMAT}"
        )
    spec = rebuild_spec(content["spec"])
    manifest = content["replay"]
    fields = _layout_of(manifest, replay_folder(folder))
    names = {field.name for field in fields}
    missing = [field.name for field in collection_fields(spec) if field.name not in names]
    if missing:
        raise ConfigurationError(f"it has no column {', '.join(missing)}")

    def read() -> Iterator[Columns]:
        yield from ReplaySnapshots(replay_folder(folder)).chunks(manifest, fields)

    return spec, dict(content["facts"]), fields, read


def _layout_of(manifest: dict[str, Any], files: Path) -> list[Field]:
    """Return the columns of a manifest."""
    fields = []
    for name, shape, dtype in manifest["fields"]:
        fields.append(Field(name, tuple(shape), dtype))
    (num_rows,), oldest = manifest["added"], manifest["oldest"]
    if oldest != [0] or not num_rows:
        raise ValueError(f"it has {num_rows} transitions from number {oldest} on")
    num_bytes = 0
    reached = [0]
    for chunk in manifest["chunks"]:
        path = files / chunk["file"]
        if not path.is_file():
            raise FileNotFoundError(f"the replay file {path} is missing")
        if chunk["first"] != reached:
            raise ValueError(f"the replay file {path} does not follow the one before it")
        reached = chunk["end"]
        num_bytes += path.stat().st_size
    # not Field.num_bytes, whose product may overflow here
    sizes_of = [math.prod(field.shape) * np.dtype(field.dtype).itemsize for field in fields]
    if num_rows * sum(sizes_of) > num_bytes:
        raise ValueError(f"{num_rows:,} rows of {sum(sizes_of):,} bytes in {num_bytes:,} bytes")
    return fields


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever damaged files raise into one error that names the collection."""
    try:
        yield
    except MemoryError as error:
        raise ConfigurationError(
            f"the collection {path} does not fit into memory ({error}): free memory, or collect"
            " fewer episodes"
        ) from error
    except (ValueError, *_DAMAGED) as error:
        reason = str(error).replace("the checkpoint's", "its")
        reason = reason.replace(f": {HINT}", "")
        raise ConfigurationError(
            f"the collection {path} cannot be read ({reason}): copy it again from where it is"
            " whole, or collect it again"
        ) from error


def _check_numbers(columns: Columns, spec: EnvSpec) -> None:
    """Check that numbers are finite."""
    for name, column in columns.items():
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            raise ConfigurationError(f"its column {name} has numbers that are not finite")


class _EpisodeCounts:
    """Rows and episodes of each task, counted and checked chunk by chunk.

    Args:
        spec: of the benchmark.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self.rows_T = np.zeros(spec.num_tasks, np.int64)
        self.episodes_T = np.zeros(spec.num_tasks, np.int64)
        self.successes_T = np.zeros(spec.num_tasks, np.int64)
        self.shortest_T = np.full(spec.num_tasks, np.iinfo(np.int64).max)
        self._has_success = False
        self._open_task: int | None = None
        """Of the episode that continues in the next chunk."""
        self._open_rows = 0
        self._open_successes = 0

    def add(self, columns: Columns) -> None:
        """Check that rows are whole episodes, one after another, each of one task; count them."""
        task_N = columns["task"]
        if not len(task_N):
            return
        is_last_N = columns["terminated"] | columns["truncated"]
        expected_N = self.episodes_T.sum() + np.cumsum(is_last_N) - is_last_N
        if not np.array_equal(columns["episode"], expected_N):
            raise ValueError("its rows are no whole episodes that follow one another")
        if task_N.min() < 0 or task_N.max() >= self._spec.num_tasks:
            raise ValueError(f"it has a task that is not from 0 to {self._spec.num_tasks - 1}")
        is_other = (task_N[1:] != task_N[:-1])[~is_last_N[:-1]].any()
        if is_other or self._open_task not in (None, task_N[0]):
            raise ValueError("an episode of it has several tasks")
        num_tasks = self._spec.num_tasks
        self.rows_T += np.bincount(task_N, minlength=num_tasks)
        task_K = task_N[is_last_N]
        self.episodes_T += np.bincount(task_K, minlength=num_tasks)
        self._has_success = "success" in columns
        success_N = columns.get("success", np.zeros_like(is_last_N))
        end_K = self._open_rows + np.flatnonzero(is_last_N) + 1
        np.minimum.at(self.shortest_T, task_K, np.diff(end_K, prepend=0))
        sum_N = self._open_successes + np.cumsum(success_N)
        success_K = np.diff(sum_N[is_last_N], prepend=0) > 0
        self.successes_T += np.bincount(task_K[success_K], minlength=num_tasks)
        self._open_task = None if is_last_N[-1] else int(task_N[-1])
        self._open_rows += len(task_N) - int(end_K[-1] if len(end_K) else 0)
        self._open_successes = int(sum_N[-1] - (sum_N[is_last_N][-1] if len(end_K) else 0))

    def check_end(self) -> None:
        """Check that there are rows, and that the last episode has ended."""
        if not self.rows_T.any():
            raise ValueError("it has no transition")
        if self._open_task is not None:
            raise ValueError("its rows are no whole episodes that follow one another")

    def named(self) -> dict[str, dict[str, int]]:
        """Return the number of episodes of each task by name, and that of successful ones."""
        counts = {"episodes": self.episodes_T}
        if self._has_success:
            counts["successes"] = self.successes_T
        return {
            name: dict(zip(self._spec.task_names, count_T.tolist(), strict=True))
            for name, count_T in counts.items()
        }


def check_collection(collection: Collection | CollectionFiles, spec: EnvSpec) -> None:
    """Check that a benchmark's trained tasks can be learned from a collection.

    The tasks are matched by name, in any order, and may be some of the collection's. The protocols
    have to be equal but for ``MAY_DIFFER``.

    Args:
        collection: the episodes.
        spec: of the benchmark that is trained on.

    Raises:
        ConfigurationError: naming both sides of a difference: another benchmark, or another version
            or reward of it; a task without an episode; a task of another size; a field of ``info``
            that is stored here alone.
    """
    there = collection.spec
    name = f"the collection {collection.folder}"
    names = [spec.task_names[task] for task in spec.train_tasks]
    keys = {*there.protocol, *spec.protocol} - {*MAY_DIFFER}
    of_other_tasks = {f"task {task}" for task in {*there.task_names, *spec.task_names} - {*names}}
    # the benchmark's kind comes first: where the benchmark differs, everything else does
    for key in sorted(keys - of_other_tasks, key=lambda key: (key != "benchmark", key)):
        value, value_here = (one.protocol.get(key, "none") for one in (there, spec))
        if value != value_here:
            raise ConfigurationError(
                f"{name} has {key} {value}, and the benchmark that is trained on {value_here}:"
                f" train in a benchmark with {key} {value}, or collect episodes in this one"
            )
    counts = collection.episodes
    missing = [task for task in names if not counts.get(task)]
    if missing:
        raise ConfigurationError(
            f"{name} has no episode of {', '.join(missing)}, and it has those of"
            f" {', '.join(task for task in there.task_names if counts[task])}: collect episodes of"
            " every trained task, or leave the others out (data.exclude_from_training)"
        )
    for task in names:
        for kind in ("observation", "action"):
            shape, shape_here = (own_shape(one, kind, task) for one in (there, spec))
            if shape != shape_here:
                raise ConfigurationError(
                    f"the {kind} of {task} has the shape {shape} in {name} and {shape_here} in the"
                    " benchmark that is trained on: use the wrappers and pixels with which it was"
                    " collected, or collect it again"
                )
    shapes = collection.shapes
    lacking = [field.name for field in spec.info_fields if shapes.get(field.name) != field.shape]
    if lacking:
        stored = ",".join(field.name for field in spec.info_fields if field.name in spec.info_keys)
        options = f"--data.info_keys [{stored}] --data.store_info true"
        how = f" by mtrl-lightning collect ... -- {options}" if stored else " in this benchmark"
        raise ConfigurationError(
            f"{name} has no {', '.join(lacking)} of the shape that the benchmark that is trained on"
            f" stores: collect it again{how}, or train without (data.store_info false)"
        )
