"""A run's replay as Minari data sets of whole episodes, one data set per task.

A replay stores no truncations: an episode ends where it terminated, where the next transition in
its ring begins elsewhere, or after ``horizon`` steps.

Shapes: ``E`` environments (rings), ``N`` transitions of a ring, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checkpoints import env_steps_of, load_checkpoint
from mtrl_lightning.checkpoints.parts import RANKS, manifests_of
from mtrl_lightning.demonstrations import RecordedEpisode, write_data_sets
from mtrl_lightning.demonstrations.minari_files import check_new
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.manifest import replay_folder
from mtrl_lightning.replay.storage import RingStorage, Storage
from mtrl_lightning.runs import checkpoint_at, run_folder_of
from mtrl_lightning.saved_spec import rebuild_spec
from mtrl_lightning.spec import Field


def export_to_minari(
    run: str | Path, folder: str | Path | None = None
) -> tuple[Path, dict[str, list[RecordedEpisode]]]:
    """Write the episodes of a run's replay as a Minari data set of each task.

    - Transitions before the first episode start that a full ring still has are left out.
    - An episode that ended without terminating is marked as truncated at its last step: at the
      horizon or at a limit of the environment; where an environment was rebuilt, and the step that
      failed is missing; or because the checkpoint was written in the middle of it.
    - Observations and actions have the task's own size. Actions are those that the policy chose,
      before ``data.action_transforms``.
    - Episodes of a task are in the order in which they began.

    Args:
        run: the folder of a run, for its newest complete checkpoint, or a checkpoint.
        folder: where the data sets are written, new; None for ``export/minari`` in the run's
            folder.

    Returns:
        The folder, which Minari takes as ``MINARI_DATASETS_PATH``, and the episodes of each trained
        task.

    Raises:
        ConfigurationError: if Minari is not installed, the run has no replay, no episode of it is
            whole, or the folder exists.
        OSError: if a file cannot be written.
    """
    checkpoint = checkpoint_at(run)
    content = load_checkpoint(checkpoint)
    run_folder = run_folder_of(checkpoint)
    folder = run_folder / "export" / "minari" if folder is None else Path(folder)
    check_new(folder)
    spec = rebuild_spec(content["mtrl_lightning"]["spec"])
    algorithm = content["mtrl_lightning"]["algorithm"]["class_path"].rpartition(".")[2]
    storage = read_replay(checkpoint, content)
    has_all = int(storage.added_E.sum()) == env_steps_of(content)
    task_E = np.repeat(spec.train_tasks, storage.num_envs // len(spec.train_tasks))
    exported = {}
    for task in spec.train_tasks:
        rings = np.flatnonzero(task_E == task).tolist()
        found = [
            (first, env, episode)
            for env in rings
            for first, episode in episodes(storage, env, spec.horizon, has_all)
        ]
        found.sort(key=lambda one: one[:2])
        exported[spec.task_names[task]] = [episode for *_, episode in found]
    if not any(exported.values()):
        raise ConfigurationError(
            f"the replay of {checkpoint} has no episode with its start: it holds"
            f" {storage.capacity} transitions of each environment, and an episode has up to"
            f" {spec.horizon}; train with a larger data.capacity or data.save_last"
        )
    facts = {"policy": algorithm, "replay": str(checkpoint)}
    write_data_sets(folder, spec, exported, facts)
    return folder.resolve(), exported


def read_replay(checkpoint: Path, content: Mapping[str, Any]) -> Storage:
    """Return the replay that a checkpoint needs.

    Args:
        checkpoint: in the ``checkpoints`` folder of a run.
        content: of the checkpoint.

    Raises:
        ConfigurationError: if it has none, or a file is missing or damaged.
    """
    if RANKS in content:
        raise ConfigurationError(
            f"{checkpoint} is of a run of {len(content[RANKS])} processes, whose replay cannot be"
            " exported: continue it with --trainer.devices 1 until its next checkpoint, and export"
            " that one"
        )
    manifests = manifests_of(content)
    if not manifests:
        raise ConfigurationError(
            f"{checkpoint} has no replay: on-policy algorithms such as PPO keep none, and others"
            " only with data.save_replay"
        )
    (manifest,) = manifests
    files = replay_folder(run_folder_of(checkpoint))
    missing = [one["file"] for one in manifest["chunks"] if not (files / one["file"]).is_file()]
    if missing:
        raise ConfigurationError(
            f"{len(missing)} of the {len(manifest['chunks'])} replay files of {checkpoint} are not"
            f" in {files}: they were deleted (data.delete_replay_at_end) or the run"
            " was copied without them; export a run that has them"
        )
    if "layout" in manifest:
        raise ConfigurationError(
            f"the replay of {checkpoint} holds frames of pixels, which cannot be exported: only"
            " replays of states can"
        )
    fields = [Field(name, tuple(shape), dtype) for name, shape, dtype in manifest["fields"]]
    storage = RingStorage(fields, len(manifest["added"]), manifest["capacity"])
    ReplaySnapshots(files).load(manifest, storage)
    return storage


def episodes(
    storage: Storage, env: int, horizon: int, has_all: bool
) -> Iterator[tuple[int, RecordedEpisode]]:
    """Yield the episodes in a ring whose start is known, in their order.

    Args:
        storage: the replay.
        env: the ring.
        horizon: steps after which an episode is truncated.
        has_all: whether the ring received every transition since the run began. If it still has
            its first one, that is the start of an episode.

    Yields:
        The number of an episode's first transition, how many the ring received before it; and the
        episode, which is truncated at its last step if it did not terminate there.
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
        # an environment whose episodes end where they start: only the horizon separates them
        while last - first >= horizon:
            yield first, first + horizon - 1
            first += horizon
        yield first, last
        first = last + 1
