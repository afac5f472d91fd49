"""Demonstrations as a replay that is filled once, for an offline algorithm.

Shapes: ``N`` transitions, ``R`` trained tasks, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from mtrl_lightning.demonstrations import check_collection, open_collection
from mtrl_lightning.devices import CPU
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay.buffer import ReplayBuffer
from mtrl_lightning.replay.frames import FrameStorage
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.resources import free_memory
from mtrl_lightning.schema import POLICY_ACTION, policy_action_field, transition_fields
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.types import Transitions

GIVE = "give the folder that mtrl-lightning collect has written"


def load_demonstrations(
    folder: str, spec: EnvSpec, seed: int, device: torch.device, split: str | None = None
) -> tuple[ReplayBuffer, dict[str, Any]]:
    """Read demonstrations of the trained tasks into a replay with one ring for each of them.

    Tasks are matched by name. Actions beyond -1 and 1 are clipped, as environments do.

    Args:
        folder: a collection.
        spec: the tasks.
        seed: of the sampling of batches.
        device: whose memory, if they take at most half of its free memory.
        split: that is trained on; episodes of another one are a warning.

    Returns:
        The replay; and the identity of its content, plain values that a checkpoint keeps.

    Raises:
        ConfigurationError: if there is no collection, it is not of these tasks, or memory is short.
    """
    collection = open_collection(folder)
    check_collection(collection, spec)
    collected = collection.facts.get("split", split)
    if split is not None and collected != split:
        rank_zero_warn(
            f"the demonstrations in {folder} are episodes of the split {collected}, which is"
            f" not trained in: an evaluation there says nothing of other episodes. Collect those of"
            f" {split}"
        )
    names = [spec.task_names[task] for task in spec.train_tasks]
    counts = {name: collection.rows[name] for name in names}
    capacity = max(counts.values()) * len(names)
    if bytes_needed(transition_fields(spec), capacity) > free_memory(device) / 2:
        device = CPU
    fields = [policy_action_field(spec)] if POLICY_ACTION in collection.shapes else []
    # room for the frames of every episode, which may be shorter than the horizon
    shortest = min(collection.shortest[name] for name in names)
    replay = ReplayBuffer(
        spec,
        capacity,
        seed,
        tasks=spec.train_tasks,
        device=device,
        policy_fields=fields,
        storage=partial(FrameStorage, horizon=shortest) if spec.frame_stack else None,
    )
    checksums: dict[str, int] = {}
    for columns in collection.chunks():
        for name, transitions in _of_trained_tasks(columns, collection.spec, spec):
            replay.add(transitions)
            for key, column in transitions.columns().items():
                content = np.ascontiguousarray(column).data
                checksums[f"{key} of {name}"] = zlib.crc32(
                    content, checksums.get(f"{key} of {name}", 0)
                )
    if len(replay) < sum(counts.values()):
        raise ConfigurationError(
            f"the images of an episode in {folder} do not follow one another: collect it again"
        )
    checksum = zlib.crc32(json.dumps(checksums, sort_keys=True).encode())
    return replay, {"transitions": counts, "crc32": checksum}


def check_identity(saved: Any, identity: dict[str, Any]) -> None:
    """Check that a continued run has the demonstrations of its checkpoint."""
    if saved != identity:
        raise ConfigurationError(
            "data.demonstrations has other transitions than those that the checkpoint's run has"
            f" learned from ({_described(saved)} there, {_described(identity)} here): give the"
            " folder of that run, or start a new run"
        )


def _described(identity: Any) -> str:
    return f"{sum(identity['transitions'].values()):,} with checksum {identity['crc32']:08x}"


def _of_trained_tasks(
    columns: Mapping[str, npt.NDArray], there: EnvSpec, spec: EnvSpec
) -> Iterator[tuple[str, Transitions]]:
    """Return the transitions of each trained task, with its name, as this benchmark has them.

    Args:
        columns: of some rows of a collection, whose order stays.
        there: the collection's spec.
        spec: this benchmark's.
    """
    observations = spec.observation_space.shape
    actions = spec.action_space.shape
    for ring, task in enumerate(spec.train_tasks):
        name = spec.task_names[task]
        rows = np.flatnonzero(columns["task"] == there.task_names.index(name))
        if not len(rows):
            continue
        extra = {field.name: columns[field.name][rows] for field in spec.info_fields}
        if POLICY_ACTION in columns:
            extra[POLICY_ACTION] = _fitted(columns[POLICY_ACTION][rows], actions).clip(-1, 1)
        yield (
            name,
            Transitions(
                observation_ED=_fitted(columns["observation"][rows], observations),
                action_EA=_fitted(columns["action"][rows], actions).clip(-1, 1),
                reward_E=columns["reward"][rows],
                next_observation_ED=_fitted(columns["next_observation"][rows], observations),
                terminated_E=columns["terminated"][rows],
                truncated_E=columns["truncated"][rows],
                task_E=np.full(len(rows), task),
                env_E=np.full(len(rows), ring),
                extra=extra,
            ),
        )


def _fitted(column: npt.NDArray, shape: tuple[int, ...]) -> npt.NDArray:
    """Return vectors with as much padding as this benchmark's have; images as they are."""
    missing = shape[0] - column.shape[1]
    if len(shape) != 1 or missing == 0:
        return column
    # tasks have the same sizes of their own in both: only padding differs
    return np.pad(column, ((0, 0), (0, missing))) if missing > 0 else column[:, : shape[0]]
