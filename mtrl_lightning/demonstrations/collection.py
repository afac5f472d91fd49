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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mtrl_lightning import saved
from mtrl_lightning.algorithms.description import describe_spec
from mtrl_lightning.algorithms.rebuilding import rebuild_spec
from mtrl_lightning.demonstrations.minari_files import (
    EXTRA,
    check_memory,
    check_minari,
    data_files,
    read_data_sets,
    write_columns,
)
from mtrl_lightning.errors import ConfigurationError, import_optional, installed_versions
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.manifest import HINT, check_manifest, replay_folder
from mtrl_lightning.replay.storage import RingStorage, check_columns
from mtrl_lightning.rollout.matching import own_shape
from mtrl_lightning.runs import ensure_writable
from mtrl_lightning.schema import POLICY_ACTION, Field, policy_action_field, transition_fields
from mtrl_lightning.spec import EnvSpec

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
    _check_episodes(stored, spec)
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


def counts_of(columns: Mapping[str, npt.NDArray], spec: EnvSpec) -> dict[str, dict[str, int]]:
    """Return the number of episodes of each task by name, and that of successful ones."""
    _, first_K = np.unique(columns["episode"], return_index=True)
    task_K = columns["task"][first_K]
    counts = {"episodes": np.bincount(task_K, minlength=spec.num_tasks)}
    if "success" in columns:
        success_K = np.logical_or.reduceat(columns["success"], first_K)
        counts["successes"] = np.bincount(task_K[success_K], minlength=spec.num_tasks)
    return {
        name: dict(zip(spec.task_names, count_T.tolist(), strict=True))
        for name, count_T in counts.items()
    }


def read_collection(path: str | Path) -> Collection:
    """Read a collection.

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
            return _read_files(path)
    if data_files(path):
        import_optional("h5py", f'"mtrl_lightning{EXTRA}"')
        with _reading(path):
            spec, columns, facts = read_data_sets(path)
            _check_episodes(columns, spec)
            return Collection(path, spec, columns, {**facts, **counts_of(columns, spec)})
    raise ConfigurationError(
        f"{path} is no collection: it has no {FILE} and no data set of Minari. Give the folder that"
        " mtrl-lightning collect or export --to minari has written"
    )


def _read_files(folder: Path) -> Collection:
    content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if content["format"] != FORMAT:
        raise ConfigurationError(
            f"it has the format {content['format']}, and this version reads {FORMAT}"
        )
    spec = rebuild_spec(content["spec"])
    facts = dict(content["facts"])
    manifest = content["replay"]
    fields, num_rows = _layout_of(manifest, replay_folder(folder))
    storage = RingStorage(fields, 1, num_rows)
    ReplaySnapshots(replay_folder(folder)).load(manifest, storage)
    rows = storage.take(*storage.numbers(0, 0, num_rows))
    columns = {name: column.numpy() for name, column in rows.items()}
    missing = [field.name for field in collection_fields(spec) if field.name not in columns]
    if missing:
        raise ConfigurationError(f"it has no column {', '.join(missing)}")
    check_columns(columns, collection_fields(spec), num_rows)
    _check_episodes(columns, spec)
    return Collection(folder, spec, columns, facts)


def _layout_of(manifest: dict[str, Any], files: Path) -> tuple[list[Field], int]:
    """Return the columns of a manifest and the number of its rows."""
    check_manifest(manifest)
    fields = []
    for name, shape, dtype in manifest["fields"]:
        sizes = tuple(saved.count(size, f"size of {name}") for size in shape)
        if np.dtype(dtype).kind not in "biuf":
            raise ValueError(f"{name} is {dtype}, not numbers")
        fields.append(Field(name, sizes, dtype))
    (num_rows,), oldest = manifest["added"], manifest["oldest"]
    if oldest != [0] or not num_rows:
        raise ValueError(f"it has {num_rows} transitions from number {oldest} on")
    num_bytes = 0
    for chunk in manifest["chunks"]:
        path = files / chunk["file"]
        if not path.is_file():
            raise FileNotFoundError(f"the replay file {path} is missing")
        num_bytes += path.stat().st_size
    # not Field.num_bytes, whose product may overflow here
    sizes_of = [math.prod(field.shape) * np.dtype(field.dtype).itemsize for field in fields]
    if num_rows * sum(sizes_of) > num_bytes:
        raise ValueError(f"{num_rows:,} rows of {sum(sizes_of):,} bytes in {num_bytes:,} bytes")
    check_memory(2 * num_bytes)  # the ring, and the copy that is returned
    return fields, num_rows


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
        for hint in (HINT, saved.HINT):
            reason = reason.replace(f": {hint}", "")
        raise ConfigurationError(
            f"the collection {path} cannot be read ({reason}): copy it again from where it is"
            " whole, or collect it again"
        ) from error


def _check_episodes(columns: Mapping[str, npt.NDArray], spec: EnvSpec) -> None:
    """Check that the rows are whole episodes, one after another, each of one task."""
    episode_N = columns["episode"]
    task_N = columns["task"]
    if not len(episode_N):
        raise ValueError("it has no transition")
    if POLICY_ACTION in columns:
        check_columns(columns, [policy_action_field(spec)], len(episode_N))
    for name, column in columns.items():
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            raise ConfigurationError(f"its column {name} has numbers that are not finite")
    is_last_N = columns["terminated"] | columns["truncated"]
    expected_N = np.cumsum(is_last_N) - is_last_N
    if not is_last_N[-1] or not np.array_equal(episode_N, expected_N):
        raise ValueError("its rows are no whole episodes that follow one another")
    if task_N.min() < 0 or task_N.max() >= spec.num_tasks:
        raise ValueError(f"it has a task that is not from 0 to {spec.num_tasks - 1}")
    if (task_N[1:] != task_N[:-1])[~is_last_N[:-1]].any():
        raise ValueError("an episode of it has several tasks")


def check_collection(collection: Collection, spec: EnvSpec) -> None:
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
    # what it is comes first: where the benchmark differs, everything else does
    for key in sorted(keys - of_other_tasks, key=lambda key: (key != "benchmark", key)):
        value, value_here = (one.protocol.get(key, "none") for one in (there, spec))
        if value != value_here:
            raise ConfigurationError(
                f"{name} has {key} {value}, and the benchmark that is trained on {value_here}:"
                f" train in a benchmark with {key} {value}, or collect episodes in this one"
            )
    counts = counts_of(collection.columns, there)["episodes"]
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
    columns = collection.columns
    lacking = [
        field.name
        for field in spec.info_fields
        if field.name not in columns or columns[field.name].shape[1:] != field.shape
    ]
    if lacking:
        stored = ",".join(field.name for field in spec.info_fields if field.name in spec.info_keys)
        options = f"--data.info_keys [{stored}] --data.store_info true"
        how = f" by mtrl-lightning collect ... -- {options}" if stored else " in this benchmark"
        raise ConfigurationError(
            f"{name} has no {', '.join(lacking)} of the shape that the benchmark that is trained on"
            f" stores: collect it again{how}, or train without (data.store_info false)"
        )
