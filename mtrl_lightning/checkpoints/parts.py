"""The parts of a checkpoint that each process ("rank") of a run has of its own.

Each rank has its own environments and episodes, part of the replay, random numbers, and metrics
since the last row. Rank 0's are where a run of one process has them; a list has those of all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

RANKS = "ranks"
"""Key of the list of all ranks' parts, in a checkpoint of several ranks."""
OF_ALGORITHM = ("generators", "global_generators", "metrics")
EXTRA_STATE = "_extra_state"
"""End of the names of states that modules save beside tensors, such as returns of episodes."""


def data_key(checkpoint: Mapping[str, Any]) -> str:
    """Return the key of the data module's state: the name of its class, as in Lightning."""
    key: str = checkpoint["mtrl_lightning"]["data"]
    return key


def own_part(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the rank that made a checkpoint."""
    algorithm = checkpoint["mtrl_lightning"]
    return {
        "data": checkpoint.get(data_key(checkpoint), {}),
        "algorithm": {name: algorithm[name] for name in OF_ALGORITHM if name in algorithm},
        "extra_states": {
            name: value
            for name, value in checkpoint["state_dict"].items()
            if name.endswith(EXTRA_STATE)
        },
    }


def with_part(checkpoint: dict[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint as the rank with this part would have made it."""
    state_dict = copy.copy(checkpoint["state_dict"])  # of the same class, with the versions in it
    state_dict.update(part["extra_states"])
    return {
        **checkpoint,
        data_key(checkpoint): part["data"],
        "mtrl_lightning": {**checkpoint["mtrl_lightning"], **part["algorithm"]},
        "state_dict": state_dict,
    }


def parts_of(checkpoint: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a checkpoint's ranks; one if it was made by one process."""
    parts: list[Mapping[str, Any]] = checkpoint.get(RANKS) or [own_part(checkpoint)]
    return parts


def manifests_of(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests of the replay files that a checkpoint needs, one of each rank."""
    if "data" not in checkpoint.get("mtrl_lightning", {}):
        return []  # of a policy, or of an algorithm that was trained without a data module
    datas = [part["data"] for part in parts_of(checkpoint)]
    return [data["replay"] for data in datas if data.get("replay")]
