"""A run's replay as Minari data sets, one data set per task.

A replay stores no truncations: an episode ends where it terminated, where the next transition in
its ring starts at another observation, or after ``horizon`` steps.

Shapes: ``E`` environments (rings), ``N`` transitions of a ring, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtrl_lightning.algorithms.arguments import OWN_CLASS, short_name
from mtrl_lightning.checkpoints import PER_ENV, env_steps_of, load_checkpoint, manifest_of
from mtrl_lightning.demonstrations import RecordedEpisode, write_data_sets
from mtrl_lightning.demonstrations.minari_files import check_new
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.index import replay_folder
from mtrl_lightning.replay.storage import RingStorage, Storage
from mtrl_lightning.runs import checkpoint_at, run_folder_of
from mtrl_lightning.spec import EnvSpec, Field


def export_to_minari(
    run: str | Path, folder: str | Path | None = None
) -> tuple[Path, dict[str, list[RecordedEpisode]]]:
    """Write the episodes in a run's replay as one Minari data set per task.

    - Transitions before the first episode start in a full ring are omitted.
    - An episode that ended without terminating is marked as truncated at its last step: at the
      horizon or a limit of the environment; where an environment was rebuilt, with the failed step
      missing; or because the checkpoint was written in the middle of the episode.
    - Observations and actions have the task's own size. Actions are those chosen by the policy,
      before ``data.action_transforms``.
    - Episodes of a task are in the order in which they started.

    Args:
        run: a run folder, for its newest complete checkpoint, or a checkpoint.
        folder: new folder for the data sets; None for ``export/minari`` in the run folder.

    Returns:
        The folder, which Minari reads as ``MINARI_DATASETS_PATH``, and the episodes of each trained
        task.
    """
    checkpoint = checkpoint_at(run)
    content = load_checkpoint(checkpoint)
    run_folder = run_folder_of(checkpoint)
    folder = run_folder / "export" / "minari" if folder is None else Path(folder)
    check_new(folder)
    manifest = manifest_of(content)
    if manifest is None or manifest["layout"]:
        raise ConfigurationError(
            f"{checkpoint} has no replay of state vectors: export a run of an off-policy algorithm"
            " without pixels, trained with data.save_replay"
        )
    fields = [Field(name, tuple(shape), dtype) for name, shape, dtype in manifest["fields"]]
    storage = RingStorage(fields, len(manifest[PER_ENV]["added"]), manifest["capacity"])
    ReplaySnapshots(replay_folder(run_folder)).load(manifest, storage)
    spec = EnvSpec.from_dict(content["mtrl_lightning"]["spec"])
    has_all = int(storage.added_E.sum()) == env_steps_of(content)
    task_E = np.repeat(spec.train_tasks, storage.num_envs // len(spec.train_tasks))
    exported = {}
    for task in spec.train_tasks:
        found = [
            (first, env, episode)
            for env in np.flatnonzero(task_E == task).tolist()
            for first, episode in episodes(storage, env, spec.horizon, has_all)
        ]
        found.sort(key=lambda one: one[:2])
        exported[spec.task_names[task]] = [episode for *_, episode in found]
    if not any(exported.values()):
        raise ConfigurationError(
            f"the replay of {checkpoint} has no episode from its start: it holds"
            f" {storage.capacity} transitions per environment, but episodes have up to"
            f" {spec.horizon}; train with a larger data.capacity or data.save_last"
        )
    algorithm = short_name(content["hyper_parameters"][OWN_CLASS])
    facts = {"policy": algorithm, "replay": str(checkpoint)}
    write_data_sets(folder, spec, exported, facts)
    return folder.resolve(), exported


def episodes(
    storage: Storage, env: int, horizon: int, has_all: bool
) -> Iterator[tuple[int, RecordedEpisode]]:
    """Yield the episodes in a ring whose start is known, in chronological order.

    Args:
        storage: the replay.
        env: the ring.
        horizon: steps after which an episode is truncated.
        has_all: whether the ring received every transition since the run started, so that the first
            one, if still present, is the start of an episode.

    Yields:
        The number of transitions that the ring received before an episode, and the episode, which
        is truncated at its last step if it did not terminate there.
    """
    end = int(storage.added_E[env])
    oldest = end - int(storage.size_E[env])
    if oldest == end:
        return
    rows = {
        name: column.cpu().numpy()
        for name, column in storage.take(*storage.numbers(env, oldest, end)).items()
    }
    has_start = has_all and oldest == 0
    for first, last in _bounds(rows, horizon, has_start):
        of_episode = {name: column[first : last + 1] for name, column in rows.items()}
        terminations = of_episode["terminated"]
        truncations = np.zeros_like(terminations)
        truncations[-1] = not terminations[-1]
        last_observation = of_episode["next_observation"][-1:]
        yield (
            oldest + first,
            RecordedEpisode(
                np.concatenate([of_episode["observation"], last_observation]),
                of_episode["action"],
                of_episode["reward"],
                terminations,
                truncations,
            ),
        )


def _bounds(
    rows: Mapping[str, npt.NDArray], horizon: int, has_start: bool
) -> Iterator[tuple[int, int]]:
    """Yield the first and the last transition of each episode whose start is known."""
    num_rows = len(rows["reward"])
    successors = rows["next_observation"][:-1].reshape(num_rows - 1, -1)
    followers = rows["observation"][1:].reshape(num_rows - 1, -1)
    is_last_N = np.ones(num_rows, np.bool_)
    is_last_N[:-1] = rows["terminated"][:-1] | (successors != followers).any(1)
    ends = np.flatnonzero(is_last_N).tolist()
    first = 0
    if not has_start:
        first = ends.pop(0) + 1
    for last in ends:
        # if episodes end where they start, only the horizon separates them
        while last - first >= horizon:
            yield first, first + horizon - 1
            first += horizon
        yield first, last
        first = last + 1
