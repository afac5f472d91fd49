"""Demonstrations as a replay that is filled once, for an offline algorithm.

Shapes: ``N`` transitions, ``R`` trained tasks, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from mtrl_lightning.demonstrations import Collection, check_collection, read_collection
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay.buffer import ReplayBuffer
from mtrl_lightning.replay.frames import FrameStorage
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.resources import CPU, free_memory
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
        device: whose memory, if they take at most half of what is free there.
        split: that is trained on; episodes of another one are a warning.

    Returns:
        The replay; and the identity of its content, plain values that a checkpoint keeps.

    Raises:
        ConfigurationError: if there is no collection, it is not of these tasks, or memory is short.
    """
    collection = read_collection(Path(folder))
    check_collection(collection, spec)
    collected = collection.facts.get("split", split)
    if split is not None and collected != split:
        rank_zero_warn(
            f"the demonstrations in {folder} are episodes of the split {collected}, which is"
            f" not trained in: an evaluation there says nothing of other episodes. Collect those of"
            f" {split}"
        )
    transitions = _transitions_of(collection, spec)
    count_R = np.bincount(transitions.env_E, minlength=len(spec.train_tasks))
    capacity = int(count_R.max()) * len(count_R)
    if bytes_needed(transition_fields(spec), capacity) > free_memory(device) / 2:
        device = CPU
    fields = [policy_action_field(spec)] if POLICY_ACTION in transitions.extra else []
    # room for the frames of every episode, which may be shorter than the horizon
    shortest = _shortest_episode(transitions)
    replay = ReplayBuffer(
        spec,
        capacity,
        seed,
        tasks=spec.train_tasks,
        device=device,
        policy_fields=fields,
        storage=partial(FrameStorage, horizon=shortest) if spec.frame_stack else None,
    )
    replay.add(transitions)
    if len(replay) < len(transitions.env_E):
        raise ConfigurationError(
            f"the images of an episode in {folder} do not follow one another: collect it again"
        )
    names = [spec.task_names[task] for task in spec.train_tasks]
    checksum = 0
    for column in transitions.columns().values():
        checksum = zlib.crc32(np.ascontiguousarray(column).data, checksum)
    counts = dict(zip(names, count_R.tolist(), strict=True))
    return replay, {"transitions": counts, "crc32": checksum}


def check_identity(saved: Any, identity: dict[str, Any]) -> None:
    """Check that a continued run has the demonstrations of its checkpoint.

    Raises:
        ConfigurationError: if it has others.
    """
    if saved != identity:
        raise ConfigurationError(
            "data.demonstrations has other transitions than those that the checkpoint's run has"
            f" learned from ({_described(saved)} there, {_described(identity)} here): give the"
            " folder of that run, or start a new run"
        )


def _described(identity: Any) -> str:
    return f"{sum(identity['transitions'].values()):,} with checksum {identity['crc32']:08x}"


def _transitions_of(collection: Collection, spec: EnvSpec) -> Transitions:
    """Return the transitions of the trained tasks, task after task, as this benchmark has them."""
    columns = collection.columns
    names = [spec.task_names[task] for task in spec.train_tasks]
    # rows of the trained tasks; a task's rows stay in the order of the collection
    rows_R = [
        np.flatnonzero(columns["task"] == collection.spec.task_names.index(name)) for name in names
    ]
    row_N = np.concatenate(rows_R)
    ring_N = np.repeat(np.arange(len(names)), [len(rows) for rows in rows_R])
    observations = spec.observation_space.shape
    actions = spec.action_space.shape
    extra = {field.name: columns[field.name][row_N] for field in spec.info_fields}
    if POLICY_ACTION in columns:
        extra[POLICY_ACTION] = _fitted(columns[POLICY_ACTION][row_N], actions).clip(-1, 1)
    return Transitions(
        observation_ED=_fitted(columns["observation"][row_N], observations),
        action_EA=_fitted(columns["action"][row_N], actions).clip(-1, 1),
        reward_E=columns["reward"][row_N],
        next_observation_ED=_fitted(columns["next_observation"][row_N], observations),
        terminated_E=columns["terminated"][row_N],
        truncated_E=columns["truncated"][row_N],
        task_E=np.array(spec.train_tasks)[ring_N],
        env_E=ring_N,
        extra=extra,
    )


def _shortest_episode(transitions: Transitions) -> int:
    """Return the steps of the shortest episode."""
    end_K = np.flatnonzero(transitions.terminated_E | transitions.truncated_E) + 1
    return int(np.diff(end_K, prepend=0).min())


def _fitted(column: npt.NDArray, shape: tuple[int, ...]) -> npt.NDArray:
    """Return vectors with as much padding as this benchmark's have; images as they are."""
    missing = shape[0] - column.shape[1]
    if len(shape) != 1 or missing == 0:
        return column
    # tasks have the same sizes of their own in both: what differs is padding
    return np.pad(column, ((0, 0), (0, missing))) if missing > 0 else column[:, : shape[0]]
