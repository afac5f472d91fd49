"""Episodes on disk as Minari data sets: a folder with one data set per task.

Minari takes the folder as ``MINARI_DATASETS_PATH``. The metadata of each data set has its task, the
spec of its benchmark, and how it was made under the key ``mtrl_lightning``.

Shapes: ``N`` transitions of an episode, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box

from mtrl_lightning.errors import ConfigurationError, import_optional, installed_versions
from mtrl_lightning.rollout.matching import own_shape
from mtrl_lightning.runs import ensure_writable
from mtrl_lightning.saved_spec import describe_spec, rebuild_spec
from mtrl_lightning.schema import POLICY_ACTION
from mtrl_lightning.spec import EnvSpec

KEY = "mtrl_lightning"
"""Of our own entry in the metadata of a data set."""
PACKAGES = ("mtrl_lightning", "metaworld", "mujoco", "gymnasium", "numpy", "torch")
"""Packages whose versions are recorded."""
_UNREADABLE = (KeyError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions that Minari and h5py raise for other files than those that are expected."""


class RecordedEpisode(NamedTuple):
    """The transitions of one episode, by Minari's names."""

    observations: npt.NDArray
    """``[N + 1, D]``, with the observation after the last step."""
    actions: npt.NDArray
    """``[N, A]``."""
    rewards: npt.NDArray
    terminations: npt.NDArray
    truncations: npt.NDArray
    infos: Mapping[str, npt.NDArray] = {}
    """Further columns by name, ``[N, ...]``: ``success`` in this step, ``policy_action``, and the
    spec's ``info_fields``."""
    seed: int | None = None
    """With which the environment was reset."""

    @property
    def num_steps(self) -> int:
        """Number of transitions, ``N``."""
        return len(self.rewards)


class TaskDataSet:
    """The data set of one task, whose episodes are read one by one.

    Args:
        path: folder of its data.

    Raises:
        ConfigurationError: if it cannot be read, or this package has not written it.
    """

    def __init__(self, path: Path) -> None:
        from minari import MinariDataset

        self._path = path
        with _reading(path):
            self._data = MinariDataset(path)
            described = self._data.storage.metadata[KEY]
            self.task: str = described["task"]
            """Its name in the spec."""
            self.spec = rebuild_spec(described["spec"])
            """Of the benchmark in which it was recorded."""
            self.facts: dict[str, Any] = described["facts"]
            """How it was recorded."""
            self._metadata = list(
                self._data.storage.get_episode_metadata(range(self._data.total_episodes))
            )
            self.lengths = [int(metadata["total_steps"]) for metadata in self._metadata]
            """Number of steps of each episode."""
            self.info_shapes = {
                name: column.shape[1:] for name, column in self._data[0].infos.items()
            }
            """Shape of one transition's entry in each column of ``infos``."""

    def episodes(self) -> Iterator[RecordedEpisode]:
        """Read the episodes; observations and actions have the task's own size.

        Raises:
            ConfigurationError: if one cannot be read.
        """
        with _reading(self._path):
            for episode, metadata in zip(self._data, self._metadata, strict=True):
                yield RecordedEpisode(
                    episode.observations,
                    episode.actions,
                    episode.rewards,
                    episode.terminations,
                    episode.truncations,
                    {name: column[1:] for name, column in episode.infos.items()},
                    metadata.get("seed"),
                )


def open_data_sets(folder: str | Path) -> dict[str, TaskDataSet]:
    """Return the data sets in a folder by the names of their tasks.

    Args:
        folder: that ``collect`` or ``export --to minari`` has written.

    Raises:
        ConfigurationError: if there is none, one cannot be read, a task has several, or Minari is
            not installed.
    """
    check_minari()
    data_sets = [TaskDataSet(path) for path in sorted(Path(folder).glob("*/data"))]
    if not data_sets:
        raise ConfigurationError(
            f"{folder} has no Minari data set: give the folder that mtrl-lightning collect or"
            " export --to minari has written"
        )
    by_task = {one.task: one for one in data_sets}
    if len(by_task) < len(data_sets):
        raise ConfigurationError(
            f"{folder} has several data sets of a task: give a folder with one data set of each"
        )
    return by_task


def write_data_sets(
    folder: str | Path,
    spec: EnvSpec,
    episodes: Mapping[str, Sequence[RecordedEpisode]],
    facts: Mapping[str, Any],
) -> None:
    """Write a data set of each task; the folder has its name only when everything is on the disk.

    Args:
        folder: new.
        spec: of the benchmark.
        episodes: of each task by its name. A task without any has no data set. Observations and
            actions are cut to the task's own size.
        facts: how they were recorded, plain values, of which ``policy`` also becomes Minari's name
            of the algorithm; the versions of packages are added.

    Raises:
        ConfigurationError: if the folder exists, cannot be written, or Minari is not installed.
        OSError: if the disk is full or broken. If only the folder's name could not be given, the
            error says where the data sets are.
    """
    check_new(Path(folder))
    folder = Path(folder).resolve()  # Minari joins a relative path with itself
    facts = {**facts, "versions": installed_versions(PACKAGES)}
    ids = dataset_ids(spec)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unfinished_"))
    finished = temporary / folder.name
    try:
        for name, of_task in episodes.items():
            if of_task:
                _write_data_set(finished, ids[name], spec, name, of_task, facts)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    os.replace(finished, folder)
    temporary.rmdir()


def check_new(folder: Path) -> None:
    """Check that data sets can be written to a folder.

    Raises:
        ConfigurationError: if the folder exists, cannot be written, or Minari is not installed.
    """
    check_minari()
    if folder.exists() or folder.is_symlink():
        raise ConfigurationError(f"{folder} exists: delete it, or give another --folder")
    ensure_writable(next(parent for parent in folder.resolve().parents if parent.exists()))


def check_minari() -> None:
    """Check that data sets can be read and written.

    Raises:
        ConfigurationError: naming the package that is not installed.
    """
    for package in ("minari", "h5py"):
        import_optional(package, '"mtrl_lightning[minari]"')


def dataset_ids(spec: EnvSpec) -> dict[str, str]:
    """Return Minari's name of the data set of each task, in which names are of letters and digits.

    Tasks whose names become the same there have other versions of the same data set.
    """
    names = [re.sub(r"[^-\w]", "_", task) for task in spec.task_names]
    return {
        task: f"{name}-v{names[:index].count(name)}"
        for index, (task, name) in enumerate(zip(spec.task_names, names, strict=True))
    }


def _write_data_set(
    folder: Path,
    dataset_id: str,
    spec: EnvSpec,
    task: str,
    episodes: Sequence[RecordedEpisode],
    facts: Mapping[str, Any],
) -> None:
    """Write the data set of a task."""
    import minari
    from minari.dataset.minari_storage import MinariStorage

    path = folder / dataset_id / "data"
    path.mkdir(parents=True)
    buffers = [_buffer(episode, spec, task) for episode in episodes]
    storage = MinariStorage.new(
        path,
        observation_space=_space(spec.observation_space, buffers[0].observations),
        action_space=_space(spec.action_space, buffers[0].actions),
        jpeg_encoding=False,
    )
    protocol = ", ".join(f"{key} {value}" for key, value in spec.protocol.items())
    storage.update_metadata(
        {
            "dataset_id": dataset_id,
            "minari_version": minari.__version__,
            "algorithm_name": str(facts.get("policy", "unknown")),
            "description": f"Episodes of the task {task}. {protocol}",
            KEY: {"task": task, "spec": describe_spec(spec), "facts": dict(facts)},
        }
    )
    storage.update_episodes(buffers)


def _buffer(episode: RecordedEpisode, spec: EnvSpec, task: str) -> Any:
    """Return an episode as Minari's buffer, with observations and actions of the task's own size.

    Its ``infos`` begin with one of the reset, which is zero.
    """
    from minari.data_collector import EpisodeBuffer

    observation_size = own_shape(spec, "observation", task)[0]
    action_size = own_shape(spec, "action", task)[0]
    infos = dict(episode.infos)
    if POLICY_ACTION in infos:
        infos[POLICY_ACTION] = infos[POLICY_ACTION][:, :action_size]
    return EpisodeBuffer(
        seed=episode.seed,
        observations=episode.observations[:, :observation_size],
        actions=episode.actions[:, :action_size],
        rewards=episode.rewards,
        terminations=episode.terminations,
        truncations=episode.truncations,
        infos={
            name: np.concatenate([np.zeros_like(column[:1]), column])
            for name, column in infos.items()
        },
    )


def _space(space: Box, rows: npt.NDArray) -> Box:
    """Return the space of rows, which have the first numbers of a larger space."""
    dtype: Any = rows.dtype
    low, high = (bound[: rows.shape[1]].astype(dtype) for bound in (space.low, space.high))
    return Box(low, high, dtype=dtype)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn the errors of unreadable files into one that names the data set."""
    try:
        yield
    except _UNREADABLE as error:
        raise ConfigurationError(
            f"the data set {path} is damaged, or mtrl-lightning has not written it"
            f" ({type(error).__name__}: {error}): copy it again, or collect it again"
        ) from error
