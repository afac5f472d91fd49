"""Continue a run with another number of processes than its checkpoint has.

The list of all environments is the same for any number of processes. Each environment moves, with
its episode under way and its ring of the replay, to the process that now steps it.

Shapes: ``E`` environments, of all processes or of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.algorithms.state import OF_EACH_RANK
from mtrl_lightning.envs.simulator import from_text, to_text
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.rank_states import parts_of, state_for, with_part

OF_ENVIRONMENTS = ("rewards", "returns")
"""What transforms save for each environment, by its number in its process."""


class _Origin(NamedTuple):
    """Where an environment of this process was."""

    rank: int
    env: int


def reshard(checkpoint: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return a checkpoint as one of ``size`` processes would have made it.

    Args:
        checkpoint: what was read, of any number of processes.
        rank: which of them.
        size: number of processes of this run.

    Raises:
        ConfigurationError: if the environments cannot be shared out, or an on-policy algorithm was
            in the middle of its updates.
    """
    parts = parts_of(checkpoint)
    if len(parts) == size:
        return state_for(checkpoint, rank, size)
    rank_zero_warn(
        f"the checkpoint is of {len(parts)} processes and this run has {size}: networks,"
        " optimizers, counters, environments in mid-episode and the replay are those of the"
        " checkpoint, and what is drawn from here on differs. It is not the uninterrupted run"
    )
    origins = origins_of(parts[0]["collector"]["tasks"], len(parts), rank, size)
    part = {
        "collector": _collector([part["collector"] for part in parts], origins, rank, size),
        "data": _data([part["data"] for part in parts], origins, rank),
        "algorithm": _algorithm([part["algorithm"] for part in parts], rank),
        "extra_states": {
            name: _extra_state([part["extra_states"][name] for part in parts], origins)
            for name in parts[0]["extra_states"]
        },
    }
    return with_part(checkpoint, part)


def origins_of(tasks: Sequence[int], former_size: int, rank: int, size: int) -> list[_Origin]:
    """Return where each environment of a process was.

    Args:
        tasks: of each environment of a former process.
        former_size: number of former processes.
        rank: which process.
        size: number of processes now.

    Raises:
        ConfigurationError: if each cannot have the same number of copies of every task.
    """
    former_copies = tasks.count(tasks[0])
    num_tasks = len(tasks) // former_copies
    copies, rest = divmod(former_copies * former_size, size)
    if rest:
        raise ConfigurationError(
            f"the checkpoint has {former_copies * former_size} copies of each task, which {size}"
            " processes cannot share out: continue with a number of processes that divides it"
        )
    origins = []
    for task in range(num_tasks):
        for copy in range(rank * copies, (rank + 1) * copies):
            former_rank, former_copy = divmod(copy, former_copies)
            origins.append(_Origin(former_rank, task * former_copies + former_copy))
    return origins


def _picked(lists: Sequence[Any], origins: Sequence[_Origin]) -> list[Any]:
    return [lists[origin.rank][origin.env] for origin in origins]


def _collector(
    states: Sequence[Mapping[str, Any]], origins: Sequence[_Origin], rank: int, size: int
) -> dict[str, Any]:
    running = [state["running"] for state in states]
    info = {
        key: {
            name: _picked([one["info"][key][name] for one in running], origins)
            for name in ("sum", "count", "last")
        }
        for key in running[0].get("info", {})
    }
    lists = {
        name: _picked([one[name] for one in running], origins)
        for name in ("return", "length", "success")
    }
    return {
        "tasks": _picked([state["tasks"] for state in states], origins),
        "windows": _windows([state["windows"] for state in states], rank, size),
        "running": {**lists, "info": info},
        "observation": _observation(states, origins),
        "envs": _picked([state["envs"] for state in states], origins),
        "listeners": states[rank % len(states)]["listeners"],
        "action_transforms": states[rank % len(states)]["action_transforms"],
    }


def _windows(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Share out the finished episodes of every task; rank 0 has the counts of all."""
    by_task = zip(*(state["windows"] for state in states), strict=True)
    windows = [[row for rows in of_task for row in rows][rank::size] for of_task in by_task]
    counts = np.sum([state["counts"] for state in states], axis=0)
    return {"windows": windows, "counts": (counts if rank == 0 else 0 * counts).tolist()}


def _observation(
    states: Sequence[Mapping[str, Any]], origins: Sequence[_Origin]
) -> list[str] | None:
    if states[0]["observation"] is None:
        return None
    dtype = states[0]["observation"][0]
    arrays = [
        from_text(state["observation"][1], dtype).reshape(len(state["tasks"]), -1)
        for state in states
    ]
    return [dtype, to_text(np.stack(_picked(arrays, origins)))]


def _data(
    states: Sequence[Mapping[str, Any]], origins: Sequence[_Origin], rank: int
) -> dict[str, Any]:
    """Return what is learned from: an iteration, or which rings of which files are read."""
    if "rollout_buffer" in states[0]:
        buffers = [state["rollout_buffer"] for state in states]
        return {"rollout_buffer": _rollout_buffer(buffers, origins, rank)}
    manifests = [state["replay"] for state in states]
    buffer = dict(states[rank]["buffer"]) if rank < len(states) else {}
    if not all(manifests):
        return {"replay": None, "buffer": buffer}
    moved = []
    for former_rank, manifest in enumerate(manifests):
        rings = [
            [origin.env, env] for env, origin in enumerate(origins) if origin.rank == former_rank
        ]
        moved.append({"manifest": manifest, "rings": rings})
    return {"replay": {"moved": moved}, "buffer": buffer}


def _rollout_buffer(
    states: Sequence[Mapping[str, Any]], origins: Sequence[_Origin], rank: int
) -> dict[str, Any]:
    if states[0]["computed"]:
        raise ConfigurationError(
            "the checkpoint is in the middle of an iteration's updates, whose minibatches belong to"
            f" {len(states)} processes: continue with as many, or from another checkpoint"
        )

    def columns(values: Sequence[Any]) -> torch.Tensor:
        return torch.stack([values[origin.rank][:, origin.env] for origin in origins], 1)

    arrays = {
        name: columns([state["arrays"][name] for state in states]) for name in states[0]["arrays"]
    }
    picked = dict(states[rank % len(states)])
    if rank >= len(states):
        del picked["generator"]
    return {**picked, "arrays": arrays, "valid": columns([state["valid"] for state in states])}


def _algorithm(states: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    state = dict(states[rank % len(states)])
    if rank >= len(states):  # a process that was not there draws from its own seed
        used = {
            name: value
            for name, value in state["generators"]["used"].items()
            if not name.startswith(OF_EACH_RANK)
        }
        state["generators"] = {**state["generators"], "used": used}
    sums: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for metrics in (one["metrics"] for one in states):
        for name, value in metrics["sums"].items() if rank == 0 else ():
            sums[name] = sums.get(name, 0) + value
            counts[name] = counts.get(name, 0) + metrics["counts"][name]
    state["metrics"] = {"sums": sums, "counts": counts}
    return state


def _extra_state(states: Sequence[Any], origins: Sequence[_Origin]) -> Any:
    first = states[0]
    if not isinstance(first, Mapping):
        return first
    moved = dict(first)
    for name in OF_ENVIRONMENTS:
        if name in first:
            moved[name] = {
                str(env): states[origin.rank][name][str(origin.env)]
                for env, origin in enumerate(origins)
                if str(origin.env) in states[origin.rank][name]
            }
    return moved
