"""The parts of a checkpoint whose values may differ between the processes ("ranks") of a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

RANKS = "ranks"
"""Key of the list of all ranks' parts, on their way to the file."""
OF_ALGORITHM = ("generators", "global_generators", "metrics")
EXTRA_STATE = "_extra_state"
"""End of the names of states that modules save beside tensors, such as returns of episodes."""


def data_key(checkpoint: Mapping[str, Any]) -> str:
    """Return the key of the data module's state: the name of its class, as in Lightning."""
    key: str = checkpoint["mtrl_lightning"]["data"]
    return key


def part_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that may differ between ranks."""
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


def with_part(checkpoint: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with another part in its place."""
    state_dict = copy.copy(checkpoint["state_dict"])  # of the same class, with the versions in it
    state_dict.update(part["extra_states"])
    return {
        **checkpoint,
        data_key(checkpoint): part["data"],
        "mtrl_lightning": {**checkpoint["mtrl_lightning"], **part["algorithm"]},
        "state_dict": state_dict,
    }


def manifest_of(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of the replay files that a checkpoint needs; None if it needs none."""
    if "data" not in checkpoint.get("mtrl_lightning", {}):
        return None  # of a policy, or of an algorithm that was trained without a data module
    manifest: dict[str, Any] | None = checkpoint.get(data_key(checkpoint), {}).get("replay")
    return manifest
