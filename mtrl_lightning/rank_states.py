"""What a checkpoint of several processes ("ranks") holds of each of them.

Each rank has its own environments and episodes, part of the replay, draws, and metrics since the
last row. They are in the places where a run of one process has them for rank 0, and in a list for
all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

RANKS = "ranks"
"""Where a checkpoint of several ranks has the list of their parts."""
DATA = "MultiTaskData"
ROLLOUT = "rollout"
OF_ALGORITHM = ("generators", "global_generators", "metrics")
EXTRA_STATE = "_extra_state"
"""End of the names of what modules save beside tensors, such as episodes under way."""


def own_part(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint has of the rank that made it."""
    algorithm = checkpoint["mtrl_lightning"]
    return {
        "collector": checkpoint["callbacks"][ROLLOUT]["collector"],
        "data": checkpoint[DATA],
        "algorithm": {name: algorithm[name] for name in OF_ALGORITHM if name in algorithm},
        "extra_states": {
            name: value
            for name, value in checkpoint["state_dict"].items()
            if name.endswith(EXTRA_STATE)
        },
    }


def with_part(checkpoint: dict[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint as the rank with this part would have made it."""
    callbacks = checkpoint["callbacks"]
    rollout = {**callbacks[ROLLOUT], "collector": part["collector"]}
    state_dict = copy.copy(checkpoint["state_dict"])  # of the same class, with the versions in it
    state_dict.update(part["extra_states"])
    return {
        **checkpoint,
        "callbacks": {**callbacks, ROLLOUT: rollout},
        DATA: part["data"],
        "mtrl_lightning": {**checkpoint["mtrl_lightning"], **part["algorithm"]},
        "state_dict": state_dict,
    }


def parts_of(checkpoint: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a checkpoint's ranks; one if it was made by one process."""
    return checkpoint[RANKS] if RANKS in checkpoint else [own_part(checkpoint)]


def state_for(checkpoint: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return the checkpoint as one of its ranks made it.

    Args:
        checkpoint: what was read.
        rank: which rank.
        size: number of its ranks.
    """
    assert len(checkpoint.get(RANKS, [None])) == size
    return with_part(checkpoint, checkpoint[RANKS][rank]) if RANKS in checkpoint else checkpoint


def manifests_of(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests of the replay files that a checkpoint needs, one of each rank."""
    if RANKS in checkpoint:
        found = [part["data"].get("replay") for part in checkpoint[RANKS]]
    else:
        found = [checkpoint.get(DATA, {}).get("replay")]
    return [manifest for manifest in found if manifest]
