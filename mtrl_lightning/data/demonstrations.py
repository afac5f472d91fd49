"""Demonstrations as a replay that is filled once, for offline algorithms.

Shapes: ``N`` transitions, ``R`` trained tasks, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from mtrl_lightning.demonstrations import RecordedEpisode, TaskDataSet, open_data_sets
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay.buffer import ReplayBuffer
from mtrl_lightning.replay.frames import FrameStorage
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.spec import EnvSpec, pad_to
from mtrl_lightning.transitions import (
    POLICY_ACTION,
    Transitions,
    policy_action_field,
    transition_fields,
)
from mtrl_lightning.utils.devices import CPU, free_memory

GIVE = "give a folder written by mtrl-lightning collect"
MAY_DIFFER = {
    "horizon",
    "evaluation_horizon",
    "frames",
    "num_goals",
    "goal_seed",
    "mujoco",
}
"""Entries of a protocol that may differ between demonstrations and the training benchmark."""


def load_demonstrations(
    folder: str, spec: EnvSpec, seed: int, device: torch.device, split: str | None = None
) -> tuple[ReplayBuffer, dict[str, Any]]:
    """Read demonstrations of the trained tasks into a replay with one ring per task.

    Tasks are matched by name. Actions are clipped to [-1, 1], as in environments.

    Args:
        folder: folder of Minari data sets written by ``collect`` or ``export --to minari``.
        spec: the tasks.
        seed: seed of batch sampling.
        device: preferred device, used if they take at most half of its free memory.
        split: training split; episodes of other splits cause a warning.

    Returns:
        The replay, and the identity of its content as plain values for checkpoints.
    """
    data_sets = open_data_sets(folder)
    names = [spec.task_names[task] for task in spec.train_tasks]
    missing = [name for name in names if name not in data_sets]
    if missing:
        raise ConfigurationError(
            f"the demonstrations in {folder} have no episode of {', '.join(missing)}, only of"
            f" {', '.join(data_sets)}: collect episodes of every trained task, or exclude the"
            " missing ones (data.exclude_from_training)"
        )
    for name in names:
        check_demonstrations(data_sets[name], spec)
    collected = data_sets[names[0]].facts.get("split", split)
    if split is not None and collected != split:
        rank_zero_warn(
            f"the demonstrations in {folder} are episodes of the split {collected}, not of the"
            f" training split: evaluating on {collected} does not measure generalization. Collect"
            f" episodes of {split}"
        )
    counts = {name: sum(data_sets[name].lengths) for name in names}
    capacity = max(counts.values()) * len(names)
    if bytes_needed(transition_fields(spec), capacity) > free_memory(device) / 2:
        device = CPU
    has_policy_action = all(POLICY_ACTION in data_sets[name].info_shapes for name in names)
    policy_fields = [policy_action_field(spec)] if has_policy_action else []
    # capacity for the frames of all episodes, which may be shorter than the horizon
    shortest = min(min(data_sets[name].lengths) for name in names)
    replay = ReplayBuffer(
        spec,
        capacity,
        seed,
        tasks=spec.train_tasks,
        device=device,
        policy_fields=policy_fields,
        storage=partial(FrameStorage, horizon=shortest) if spec.frame_stack else None,
    )
    checksum = 0
    for ring, name in enumerate(names):
        for episode in data_sets[name].episodes():
            transitions = _transitions(episode, ring, spec)
            replay.add(transitions)
            for column in transitions.columns().values():
                checksum = zlib.crc32(np.ascontiguousarray(column).data, checksum)
    if len(replay) < sum(counts.values()):
        raise ConfigurationError(
            f"the frame stacks of an episode in {folder} are not consecutive: collect it again"
        )
    return replay, {"transitions": counts, "crc32": checksum}


def check_demonstrations(data_set: TaskDataSet, spec: EnvSpec) -> None:
    """Check that a task's demonstrations are compatible with the training benchmark.

    The protocols must be equal except for ``MAY_DIFFER``.

    Args:
        data_set: the demonstrations.
        spec: spec of the training benchmark, which has the task.
    """
    name = data_set.task
    source = data_set.spec
    for key in sorted({*source.protocol, *spec.protocol} - MAY_DIFFER):
        values = [one.protocol.get(key, "none") for one in (source, spec)]
        is_of_other_task = key.startswith("task ") and key != f"task {name}"
        if values[0] != values[1] and not is_of_other_task:
            raise ConfigurationError(
                f"the demonstrations of {name} have {key} {values[0]}, but the training benchmark"
                f" has {values[1]}: train on a benchmark with {key} {values[0]}, or collect"
                " episodes in this one"
            )
    for kind in ("observation", "action"):
        shapes = [one.shape_of(kind, one.task_names.index(name)) for one in (source, spec)]
        if shapes[0] != shapes[1]:
            raise ConfigurationError(
                f"the {kind} of {name} has shape {shapes[0]} in the demonstrations and"
                f" {shapes[1]} in the training benchmark: use the wrappers and pixels with which"
                " they were collected, or collect them again"
            )
    lacking = [
        field.name
        for field in spec.info_fields
        if data_set.info_shapes.get(field.name) != field.shape
    ]
    if lacking:
        stored = ",".join(field.name for field in spec.info_fields if field.name in spec.info_keys)
        options = f"--data.info_keys [{stored}] --data.store_info true"
        how = f" by mtrl-lightning collect ... -- {options}" if stored else " in this benchmark"
        raise ConfigurationError(
            f"the demonstrations of {name} have no {', '.join(lacking)} of the shape that the"
            f" training benchmark stores: collect them again{how}, or train without"
            " (data.store_info false)"
        )


def check_identity(saved: Any, identity: dict[str, Any]) -> None:
    """Check that a resumed run has the demonstrations of its checkpoint."""
    if saved != identity:
        raise ConfigurationError(
            "data.demonstrations has other transitions than those the checkpoint was trained on"
            f" ({_described(identity)} instead of {_described(saved)}): give the original folder,"
            " or start a new run"
        )


def _described(identity: Any) -> str:
    return f"{sum(identity['transitions'].values()):,} with checksum {identity['crc32']:08x}"


def _transitions(episode: RecordedEpisode, ring: int, spec: EnvSpec) -> Transitions:
    """Convert an episode to transitions of this benchmark.

    Args:
        episode: an episode of a trained task.
        ring: index of the task in ``spec.train_tasks``.
        spec: spec of this benchmark.
    """
    observations = pad_to(episode.observations, spec.observation_space.shape)
    actions = spec.action_space.shape
    extra = {field.name: episode.infos[field.name] for field in spec.info_fields}
    if POLICY_ACTION in episode.infos:
        extra[POLICY_ACTION] = pad_to(episode.infos[POLICY_ACTION], actions).clip(-1, 1)
    return Transitions(
        observation_ED=observations[:-1],
        action_EA=pad_to(episode.actions, actions).clip(-1, 1),
        reward_E=episode.rewards,
        next_observation_ED=observations[1:],
        terminated_E=episode.terminations,
        truncated_E=episode.truncations,
        task_E=np.full(episode.num_steps, spec.train_tasks[ring]),
        env_E=np.full(episode.num_steps, ring),
        extra=extra,
    )
