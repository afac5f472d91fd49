"""The parts of a checkpoint that each process ("rank") of a run has of its own.

Each rank has its own environments and episodes, part of the replay, random numbers, and metrics
since the last row. Rank 0's are where a run of one process has them; a list has those of all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from mtrl_lightning.checks import HINT
from mtrl_lightning.errors import ConfigurationError

RANKS = "ranks"
"""Key of the list of all ranks' parts, in a checkpoint of several ranks."""
PART = ("collector", "data", "algorithm", "extra_states")
"""Keys of a rank's part."""
DATA = "MultiTaskData"
MOVED = "moved"
"""Key of the rings of other ranks that a rank reads; it is never saved."""
ROLLOUT = "rollout"
OF_ALGORITHM = ("generators", "global_generators", "metrics")
EXTRA_STATE = "_extra_state"
"""End of the names of states that modules save beside tensors, such as returns of episodes."""


def own_part(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the rank that made a checkpoint."""
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
    """Return the parts of a checkpoint's ranks; one if it was made by one process.

    Raises:
        ConfigurationError: if a part is not one of this checkpoint.
    """
    if RANKS not in checkpoint:
        return [own_part(checkpoint)]
    parts = checkpoint[RANKS]
    if not isinstance(parts, list) or not parts:
        raise ConfigurationError(f"the checkpoint's {RANKS} is no list of processes: {HINT}")
    names = own_part(checkpoint)["extra_states"].keys()
    for rank, part in enumerate(parts):
        mistake = _mistake_in(part, rank, names)
        if mistake:
            raise ConfigurationError(f"the checkpoint's part of rank {rank} {mistake}: {HINT}")
    return parts


def _mistake_in(part: Any, rank: int, names: Iterable[str]) -> str:
    """Return the end of a sentence about a part that is damaged; empty if it is not."""
    if not isinstance(part, dict) or part.keys() != {*PART}:
        return f"does not consist of {', '.join(PART)}"
    for key in PART:
        if not isinstance(part[key], dict):
            return f"has a {key} that is no dictionary"
    if not part["algorithm"].keys() <= {*OF_ALGORITHM}:
        return f"has more of the algorithm than {', '.join(OF_ALGORITHM)}"
    if part["extra_states"].keys() != {*names}:
        return "has the states of other modules"
    manifest = part["data"].get("replay")
    if isinstance(manifest, dict) and manifest.get("folder") != f"rank_{rank}":
        return f"has a replay that is not in rank_{rank}"
    return ""


def manifests_of(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the manifests of the replay files that a checkpoint needs, one of each rank.

    Raises:
        ConfigurationError: if one is damaged.
    """
    if RANKS in checkpoint:
        manifests = [part["data"].get("replay") for part in parts_of(checkpoint)]
    else:
        manifests = [checkpoint.get(DATA, {}).get("replay")]
    for manifest in manifests:
        if manifest is not None and (not isinstance(manifest, dict) or MOVED in manifest):
            raise ConfigurationError(f"the checkpoint's list of replay files is none: {HINT}")
    return [manifest for manifest in manifests if manifest]
