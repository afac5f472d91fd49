"""Collections as Minari data sets of whole episodes, one data set per task.

The metadata of each has the spec and the facts under the key ``mtrl_lightning``.

Shapes: ``N`` transitions of an episode, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from mtrl_lightning.checks import check_booleans
from mtrl_lightning.errors import import_optional
from mtrl_lightning.replay.storage import Columns
from mtrl_lightning.resources import free_memory
from mtrl_lightning.saved_spec import describe_spec, rebuild_spec
from mtrl_lightning.schema import POLICY_ACTION, STORED, policy_action_field, step_fields
from mtrl_lightning.spec import EnvSpec, Field

VERSION = 0
"""Version in the names of the data sets."""
DATA_FILE = "main_data.hdf5"
METADATA_FILE = "metadata.json"
KEY = "mtrl_lightning"
EXTRA = "[minari]"
FIELDS = ("observations", "actions", "rewards", "terminations", "truncations")
"""The entries of an episode in a data set."""
MOST_TIMES = 1032
"""Bytes of a compressed array for each byte of it in the file: no file of gzip's has more."""
MOST_CHUNK_BYTES = 64 << 20
"""Bytes of a chunk, which is read as a whole."""


def check_minari() -> None:
    """Check that data sets can be written.

    Raises:
        ConfigurationError: naming the package that is not installed.
    """
    for package in ("minari", "h5py"):
        import_optional(package, f'"mtrl_lightning{EXTRA}"')


def write_data_set(
    folder: str | Path,
    dataset_id: str,
    episodes: Sequence[Mapping[str, Any]],
    spec: EnvSpec,
    task: int,
    *,
    algorithm: str,
    description: str,
    facts: Mapping[str, Any],
) -> None:
    """Write the data set of a task.

    Args:
        folder: which Minari takes as ``MINARI_DATASETS_PATH``.
        dataset_id: name of the data set.
        episodes: arguments of Minari's ``EpisodeBuffer``; observations ``[N + 1, D]`` and actions
            ``[N, A]`` are cut to the task's own size.
        spec: of the benchmark.
        task: the task's index.
        algorithm: name of the policy.
        description: for a reader of the data set.
        facts: of the collection.
    """
    from minari import create_dataset_from_buffers
    from minari.data_collector.episode_buffer import EpisodeBuffer

    # None, for tasks of one size, is the whole
    observation_size = spec.observation_sizes[task] if spec.observation_sizes else None
    action_size = spec.action_sizes[task] if spec.action_sizes else None
    buffers = []
    for index, episode in enumerate(episodes):
        of_task_size = {
            "observations": episode["observations"][:, :observation_size],
            "actions": episode["actions"][:, :action_size],
        }
        buffers.append(EpisodeBuffer(id=index, **{**episode, **of_task_size}))
    protocol = ", ".join(f"{key} {value}" for key, value in spec.protocol.items())
    root = Path(folder).resolve()  # Minari joins a relative one with itself
    with warnings.catch_warnings(), patch.dict(os.environ, MINARI_DATASETS_PATH=str(root)):
        warnings.simplefilter("ignore")  # that there is no author and no registered environment
        data_set = create_dataset_from_buffers(
            dataset_id,
            buffers,
            observation_space=_own_space(spec.observation_space, observation_size),
            action_space=_own_space(spec.action_space, action_size),
            algorithm_name=algorithm,
            description=f"{description} {protocol}",
            jpeg_encoding=False,
        )
    described = {"task": spec.task_names[task], "spec": describe_spec(spec), "facts": dict(facts)}
    data_set.storage.update_metadata({KEY: described})


def write_columns(
    folder: Path, spec: EnvSpec, columns: Mapping[str, npt.NDArray], facts: Mapping[str, Any]
) -> None:
    """Write the data set of each task of a collection, under the task's name.

    Args:
        folder: which Minari takes as ``MINARI_DATASETS_PATH``.
        spec: of the benchmark.
        columns: as in ``Collection``. The success and further fields are in ``infos``, where the
            first entry, at the reset, is zero.
        facts: of the collection; those of ``seeds`` are also the seeds of the episodes.
    """
    core = {*STORED, "truncated", "task", "episode"}
    end_K = np.flatnonzero(columns["terminated"] | columns["truncated"]) + 1
    start_K = np.concatenate([[0], end_K[:-1]])
    for task, name in enumerate(spec.task_names):
        seeds = facts.get("seeds", {}).get(name)
        episodes: list[dict[str, Any]] = []
        for start, end in zip(start_K, end_K, strict=True):
            if columns["task"][start] != task:
                continue
            rows = {key: column[start:end] for key, column in columns.items()}
            infos = {
                key: np.concatenate([np.zeros_like(column[:1]), column])
                for key, column in rows.items()
                if key not in core
            }
            observations = [rows["observation"], rows["next_observation"][-1:]]
            episodes.append(
                {
                    "observations": np.concatenate(observations),
                    "actions": rows["action"],
                    "rewards": rows["reward"],
                    "terminations": rows["terminated"],
                    "truncations": rows["truncated"],
                    "infos": infos or None,
                    "seed": seeds[len(episodes)] if seeds else None,
                }
            )
        if episodes:
            write_data_set(
                folder,
                f"{valid_name(name)}-v{VERSION}",
                episodes,
                spec,
                task,
                algorithm=str(facts.get("policy", "unknown")),
                description=f"Episodes of the task {name}.",
                facts=facts,
            )


def _own_space(space: Box, size: int | None) -> Box:
    """Return the first numbers of a space, of the type in which they are stored."""
    is_float = np.issubdtype(space.dtype, np.floating)
    dtype: Any = np.float32 if is_float else space.dtype
    return Box(space.low[:size].astype(dtype), space.high[:size].astype(dtype), dtype=dtype)


def valid_name(text: str) -> str:
    """Return a name that Minari accepts."""
    return re.sub(r"[^-\w]", "_", text)


def data_files(folder: Path) -> list[Path]:
    """Return the files of all data sets in a folder."""
    return sorted(folder.rglob(DATA_FILE)) if folder.is_dir() else []


def open_data_sets(
    folder: Path,
) -> tuple[EnvSpec, dict[str, Any], list[Field], Callable[[], Iterator[Columns]]]:
    """Return spec, facts and columns of the data sets in a folder, and their reader.

    Raises:
        ConfigurationError: if h5py is not installed.
        MemoryError: if an episode does not fit into memory.
        ValueError: naming what a data set lacks.
    """
    h5py = import_optional("h5py", f'"mtrl_lightning{EXTRA}"')
    described = {path: _described(path) for path in data_files(folder)}
    specs = [described_of["spec"] for described_of in described.values()]
    if any(one != specs[0] for one in specs):
        raise ValueError("it has data sets of several collections: give the folder of one of them")
    spec = rebuild_spec(specs[0])
    tasks = {path: spec.task_names.index(one["task"]) for path, one in described.items()}

    def read_all() -> Iterator[dict[str, npt.NDArray]]:
        """Return the columns of one episode after another, task after task."""
        num_episodes = 0
        for path in sorted(tasks, key=lambda path: tasks[path]):
            with h5py.File(path, "r") as file:
                reader = _Reader(h5py, path.stat().st_size)
                for name in sorted(file, key=lambda name: int(name.removeprefix("episode_"))):
                    where = f"{name} of {path}"
                    columns = _columns(reader, reader.entry(file, name, where), where, spec)
                    num_rows = len(columns["reward"])
                    columns["task"] = np.full(num_rows, tasks[path])
                    columns["episode"] = np.full(num_rows, num_episodes)
                    num_episodes += 1
                    yield columns

    fields: dict[str, Field] = {}
    for number, columns in enumerate(read_all()):
        of_episode = {
            name: Field(name, column.shape[1:], column.dtype.name)
            for name, column in columns.items()
        }
        if number == 0:
            fields = of_episode
        fields = {name: field for name, field in fields.items() if name in of_episode}
        for name, field in fields.items():
            if of_episode[name] != field:
                raise ValueError(f"{name} has other shapes or types in some episodes")
    if not fields:
        raise ValueError("its data sets have no episode")

    def read() -> Iterator[Columns]:
        for columns in read_all():
            yield {name: columns[name] for name in fields}

    return spec, dict(next(iter(described.values()))["facts"]), list(fields.values()), read


def check_memory(num_bytes: int) -> None:
    """Check that arrays fit into memory.

    Raises:
        MemoryError: if they do not.
    """
    free = free_memory()
    if num_bytes > free:
        sizes = (f"{size / 2**30:.1f} GiB" for size in (num_bytes, free))
        raise MemoryError("it needs {} and {} are free".format(*sizes))


class _Reader:
    """Reads arrays of a file of HDF5, which decides neither the memory nor what is read with it.

    Args:
        h5py: the package.
        file_bytes: size of the file.
    """

    def __init__(self, h5py: Any, file_bytes: int) -> None:
        self._h5py = h5py
        self._left = file_bytes
        """Bytes of the file that no array has been read from."""

    def entry(self, group: Any, name: str, where: str) -> Any:
        """Return a group or dataset that is in the file itself; None if there is none.

        Raises:
            ValueError: if it is a link, which may lead into another file.
        """
        # the low level: the high one opens the file that an external link names
        links = group.id.links
        if not links.exists(name.encode()):
            return None
        if links.get_info(name.encode()).type != self._h5py.h5l.TYPE_HARD:
            raise ValueError(f"{name} in {where} is a link")
        return group[name]

    def array(self, dataset: Any, name: str, where: str) -> npt.NDArray:
        """Return the content of a dataset.

        Raises:
            ValueError: if it is none of numbers in the file itself, or has too many bytes.
        """
        if not isinstance(dataset, self._h5py.Dataset) or not dataset.shape:
            raise ValueError(f"{name} in {where} is no array")
        if dataset.external is not None or dataset.is_virtual:
            raise ValueError(f"{name} in {where} is stored in another file")
        if dataset.dtype.kind not in "biuf":
            shape = list(dataset.shape)
            raise ValueError(
                f"{name} in {where} is {dataset.dtype} {shape}, not {shape[0]} numbers"
            )
        # several names may lead to the same bytes
        in_file = dataset.id.get_storage_size()
        self._left -= in_file
        is_compressed = dataset.id.get_create_plist().get_nfilters() > 0
        most_bytes = in_file * (MOST_TIMES if is_compressed else 1)
        chunk_bytes = math.prod(dataset.chunks or ()) * dataset.dtype.itemsize
        if self._left < 0 or dataset.nbytes > most_bytes or chunk_bytes > MOST_CHUNK_BYTES:
            raise ValueError(
                f"{name} in {where} has {dataset.nbytes:,} bytes in chunks of {chunk_bytes:,}, too"
                " many for a file of this size"
            )
        check_memory(dataset.nbytes)
        content = dataset[()]
        check_booleans(content)
        return content


def _described(path: Path) -> dict[str, Any]:
    """Return the description of a collection in the metadata of a data set."""
    metadata_file = path.parent / METADATA_FILE
    if not metadata_file.is_file():
        raise ValueError(f"{metadata_file} is missing")
    metadata = json.loads(metadata_file.read_text(encoding="utf-8"))
    for key in ("spec", "task", "facts"):
        if key not in metadata.get(KEY, {}):
            raise ValueError(
                f"{metadata_file} has no {KEY}.{key}, which collect --to minari and export --to"
                " minari write"
            )
    return metadata[KEY]


def _columns(reader: _Reader, group: Any, where: str, spec: EnvSpec) -> dict[str, npt.NDArray]:
    """Return the columns of an episode, without task and number."""
    entries = {name: reader.entry(group, name, where) for name in FIELDS}
    missing = [name for name, entry in entries.items() if entry is None]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}")
    arrays = {
        name: reader.array(entry, name.removesuffix("s"), where) for name, entry in entries.items()
    }
    num_steps = len(arrays["rewards"])
    columns = {
        "observation": arrays["observations"][:num_steps],
        "action": arrays["actions"],
        "reward": arrays["rewards"],
        "next_observation": arrays["observations"][1:],
        "terminated": arrays["terminations"],
        "truncated": arrays["truncations"],
    }
    infos = reader.entry(group, "infos", where)
    for name in () if infos is None else infos:
        if name in {*columns, "task", "episode"}:
            raise ValueError(f"infos/{name} in {where} has the name of another column")
        entry = reader.entry(infos, name, f"infos of {where}")
        columns[name] = reader.array(entry, name, where)[1:]
    fields = {field.name: field.stored() for field in step_fields(spec)}
    fields[POLICY_ACTION] = policy_action_field(spec)
    check_memory(num_steps * sum(fields[name].num_bytes for name in columns if name in fields))
    for name, column in columns.items():
        shape = f"{column.dtype} {list(column.shape)}"
        if len(column) != num_steps:
            raise ValueError(f"{name} in {where} is {shape}, not {num_steps} numbers")
        field = fields.get(name)
        if field is None:
            continue
        is_other_type = (column.dtype.kind == "b") != (field.dtype == "bool")
        has_other_rank = column.ndim != 1 + len(field.shape)
        missing_sizes = np.subtract(field.shape, column.shape[1:]) if not has_other_rank else ()
        if is_other_type or has_other_rank or min(missing_sizes, default=0) < 0:
            raise ValueError(
                f"{name} in {where} is {shape}, not {field.dtype} {[num_steps, *field.shape]}"
            )
        # zeros behind a task's own size
        padding = [(0, 0), *((0, size) for size in missing_sizes)]
        columns[name] = np.pad(column, padding).astype(field.dtype)
    return columns
