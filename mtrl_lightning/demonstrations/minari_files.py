"""Episodes on disk as Minari data sets: a folder with one data set per task.

Minari reads the folder as ``MINARI_DATASETS_PATH``. The metadata of each data set contains its
task, the spec of its benchmark and its provenance under the key ``mtrl_lightning``.

Shapes: ``N`` transitions of an episode, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Discrete, MultiDiscrete, Space

from mtrl_lightning.errors import ConfigurationError, import_optional, installed_versions
from mtrl_lightning.runs import ensure_writable
from mtrl_lightning.spec import EnvSpec, chosen, one_hot_rows, pad_to
from mtrl_lightning.transitions import POLICY_ACTION

KEY = "mtrl_lightning"
"""Key of this package's entry in the metadata of a data set."""
PACKAGES = ("mtrl_lightning", "metaworld", "mujoco", "gymnasium", "numpy", "torch")
"""Packages whose versions are recorded."""


class RecordedEpisode(NamedTuple):
    """The transitions of one episode, with Minari's names."""

    observations: npt.NDArray
    """``[N + 1, D]``, including the observation after the last step."""
    actions: npt.NDArray
    """``[N, A]``."""
    rewards: npt.NDArray
    terminations: npt.NDArray
    truncations: npt.NDArray
    infos: Mapping[str, npt.NDArray] = {}
    """Further columns by name, ``[N, ...]``: ``success`` of each step, ``policy_action``, and the
    spec's ``info_fields``."""
    seed: int | None = None
    """Seed with which the environment was reset."""

    @property
    def num_steps(self) -> int:
        """Number of transitions, ``N``."""
        return len(self.rewards)


class TaskDataSet:
    """The data set of one task, whose episodes are read lazily.

    Args:
        path: folder of the data.
    """

    def __init__(self, path: Path) -> None:
        self._data = import_minari().MinariDataset(path)
        described = self._data.storage.metadata.get(KEY)
        if described is None:
            raise ConfigurationError(
                f"the data set {path} was not written by mtrl-lightning: collect it with"
                " mtrl-lightning collect"
            )
        self.task: str = described["task"]
        """The task's name in the spec."""
        self.spec = EnvSpec.from_dict(described["spec"])
        """Spec of the benchmark in which it was recorded."""
        self.facts: dict[str, Any] = described["facts"]
        """How it was recorded."""
        self._metadata = list(
            self._data.storage.get_episode_metadata(range(self._data.total_episodes))
        )
        self.lengths = [int(metadata["total_steps"]) for metadata in self._metadata]
        """Number of steps of each episode."""
        self.info_shapes = {name: rows.shape[1:] for name, rows in self._data[0].infos.items()}
        """Shape of one transition's entry in each column of ``infos``."""

    def episodes(self) -> Iterator[RecordedEpisode]:
        """Read the episodes; observations and actions have the task's own size."""
        for episode, metadata in zip(self._data, self._metadata, strict=True):
            yield RecordedEpisode(
                episode.observations,
                self._rows(episode.actions),
                episode.rewards,
                episode.terminations,
                episode.truncations,
                {name: column[1:] for name, column in episode.infos.items()},
                metadata.get("seed"),
            )

    def _rows(self, action_NA: npt.NDArray) -> npt.NDArray:
        """Return actions as rows; of discrete ones, Minari has the indices."""
        if not self.spec.is_discrete:
            return action_NA
        return one_hot_rows(
            action_NA, own_choices(self.spec, self.spec.task_names.index(self.task))
        )


def open_data_sets(folder: str | Path) -> dict[str, TaskDataSet]:
    """Return the data sets that ``collect`` or ``export --to minari`` wrote, by task."""
    import_minari()
    data_sets = [TaskDataSet(path) for path in sorted(Path(folder).glob("*/data"))]
    if not data_sets:
        raise ConfigurationError(
            f"{folder} has no Minari data set: give a folder written by mtrl-lightning collect or"
            " export --to minari"
        )
    return {one.task: one for one in data_sets}


def write_data_sets(
    folder: str | Path,
    spec: EnvSpec,
    episodes: Mapping[str, Sequence[RecordedEpisode]],
    facts: Mapping[str, Any],
) -> None:
    """Write one data set per task atomically: the folder only appears when it is complete.

    Args:
        folder: a new folder.
        spec: spec of the benchmark.
        episodes: episodes by task name; tasks without episodes get no data set. Observations and
            actions are cut to the task's own size.
        facts: provenance as plain values; ``policy`` is also Minari's name of the algorithm.
            Package versions are added.
    """
    check_new(Path(folder))
    folder = Path(folder).resolve()  # Minari joins a relative path with itself
    facts = {**facts, "versions": installed_versions(PACKAGES)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished_") as temporary:
        finished = Path(temporary) / folder.name
        names: Counter[str] = Counter()
        for task in spec.task_names:
            name = re.sub(r"[^-\w]", "_", task)  # Minari only allows such names
            if episodes.get(task):
                dataset_id = f"{name}-v{names[name]}"
                _write_data_set(finished, dataset_id, spec, task, episodes[task], facts)
            names[name] += 1
        finished.replace(folder)


def check_new(folder: Path) -> None:
    """Check that a folder is new, before episodes are collected."""
    import_minari()
    if folder.exists() or folder.is_symlink():
        raise ConfigurationError(f"{folder} exists: delete it, or give another --folder")
    ensure_writable(next(parent for parent in folder.resolve().parents if parent.exists()))


def import_minari() -> Any:
    """Import ``minari`` with h5py, in which it stores data."""
    import_optional("h5py", "minari")
    return import_optional("minari", "minari")


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
    task_index = spec.task_names.index(task)
    buffers = [_buffer(episode, spec, task_index) for episode in episodes]
    storage = MinariStorage.new(
        path,
        observation_space=_space(spec.observation_space, buffers[0].observations),
        action_space=_action_space(spec, task_index, buffers[0].actions),
        jpeg_encoding=False,
    )
    protocol = ", ".join(f"{key} {value}" for key, value in spec.protocol.items())
    storage.update_metadata(
        {
            "dataset_id": dataset_id,
            "minari_version": minari.__version__,
            "algorithm_name": str(facts.get("policy", "unknown")),
            "description": f"Episodes of the task {task}. {protocol}",
            KEY: {"task": task, "spec": spec.to_dict(), "facts": dict(facts)},
        }
    )
    storage.update_episodes(buffers)


def _buffer(episode: RecordedEpisode, spec: EnvSpec, task: int) -> Any:
    """Convert an episode to Minari's buffer, with observations and actions of the task's own size.

    Its ``infos`` start with those of the reset, which are zero.
    """
    from minari.data_collector import EpisodeBuffer

    observation_shape, action_shape = (spec.shape_of(k, task) for k in ("observation", "action"))
    actions = pad_to(episode.actions, action_shape)
    infos = dict(episode.infos)
    if POLICY_ACTION in infos:
        infos[POLICY_ACTION] = pad_to(infos[POLICY_ACTION], action_shape)
    return EpisodeBuffer(
        seed=episode.seed,
        observations=pad_to(episode.observations, observation_shape),
        actions=chosen(actions, own_choices(spec, task)) if spec.is_discrete else actions,
        rewards=episode.rewards,
        terminations=episode.terminations,
        truncations=episode.truncations,
        infos={
            name: np.concatenate([np.zeros_like(column[:1]), column])
            for name, column in infos.items()
        },
    )


def own_choices(spec: EnvSpec, task: int) -> tuple[int, ...]:
    """Return the number of choices of each component of a task's own actions."""
    return spec.shape_of("action", task) if len(spec.action_choices) == 1 else spec.action_choices


def _action_space(spec: EnvSpec, task: int, rows: npt.NDArray) -> Space:
    if not spec.is_discrete:
        return _space(spec.action_space, rows)
    choices = own_choices(spec, task)
    return MultiDiscrete([*choices]) if len(choices) > 1 else Discrete(choices[0])


def _space(space: Box, rows: npt.NDArray) -> Box:
    """Return the space of rows that are cut from a larger space."""
    dtype: Any = rows.dtype
    low, high = (bound[: rows.shape[1]].astype(dtype) for bound in (space.low, space.high))
    return Box(low, high, dtype=dtype)
