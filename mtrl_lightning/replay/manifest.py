"""The manifest of a replay: which files of a run's folder hold its transitions.

A checkpoint carries it. It is read from a file, so nothing in it is trusted: names must be names
of replay files, and the transitions of its files must follow one another without a gap.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning import checks
from mtrl_lightning.checkpoints.parts import MOVED
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks.share import Share

FILE_NAME = re.compile(r"rows_\d+_\d+_[0-9a-f]{8}\.npy")
RANK_FOLDER = re.compile(r"(rank_\d+)?")
HINT = "continue from another checkpoint, or without the replay (--replay.restore false)"
EMPTY_MANIFEST: dict[str, Any] = {
    "fields": [],
    "capacity": 0,
    "added": [],
    "oldest": [],
    "chunks": [],
}
"""The manifest of no replay."""


def replay_folder(run_folder: Path) -> Path:
    """Return the folder of the replay in a run's folder."""
    return run_folder / "replay"


def check_manifest(manifest: dict[str, Any]) -> None:
    """Check that a manifest names chunks in the run's folder, one after another without a gap."""
    try:
        wrong = _what_is_wrong(manifest)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        wrong = f"cannot be understood ({error})"
    if wrong:
        raise ConfigurationError(f"the checkpoint's list of replay files {wrong}: {HINT}")


def reshard_manifests(
    manifests: Sequence[dict[str, Any] | None], share: Share
) -> dict[str, Any] | None:
    """Return the source manifest and ring of each ring of a rank.

    Args:
        manifests: of all saved ranks; None without a saved replay.
        share: the rank, and the environments that it takes over.

    Raises:
        ConfigurationError: if a manifest does not have one ring per environment.
    """
    moved = []
    for saved_rank, manifest in enumerate(manifests):
        if not manifest:
            return None
        if len(manifest["added"]) != share.num_envs:
            raise ConfigurationError(
                f"the checkpoint's replay has {len(manifest['added'])} rings for"
                f" {share.num_envs} environments: {checks.HINT}"
            )
        rings = [
            [source.env, env]
            for env, source in enumerate(share.saved_envs)
            if source.rank == saved_rank
        ]
        moved.append({"manifest": manifest, "rings": rings})
    return {MOVED: moved}


def _what_is_wrong(manifest: dict[str, Any]) -> str:
    if not all(isinstance(name, str) for name, _, _ in manifest["fields"]):
        return "names no fields"
    if not RANK_FOLDER.fullmatch(manifest.get("folder", "")):
        return f"names {manifest['folder']!r}, no folder of a process"
    for chunk in manifest["chunks"]:
        if not FILE_NAME.fullmatch(chunk["file"]):
            return f"names {chunk['file']!r}, no file of a replay"
    if len({chunk["file"] for chunk in manifest["chunks"]}) < len(manifest["chunks"]):
        return "names a file twice"
    capacity = checks.count(manifest["capacity"], "capacity of the replay")
    num_envs = len(manifest["added"])
    added_E = _counts(manifest["added"], num_envs)
    oldest_E = _counts(manifest["oldest"], num_envs)
    reached_E = oldest_E
    for chunk in manifest["chunks"]:
        first_E = _counts(chunk["first"], num_envs)
        end_E = _counts(chunk["end"], num_envs)
        is_gap_E = first_E > np.maximum(reached_E, oldest_E)
        is_too_long_E = end_E - first_E > capacity
        if (is_gap_E | is_too_long_E | (end_E < first_E)).any():
            return f"does not follow at {chunk['file']}"
        reached_E = end_E
    if (reached_E != added_E).any() or (oldest_E > added_E).any():
        return "does not hold all rows"
    return ""


def _counts(values: Any, num_envs: int) -> npt.NDArray[np.int64]:
    """Return one whole number for each environment."""
    if len(values) != num_envs:
        raise ValueError(f"{len(values)} numbers for {num_envs} environments")
    return np.array([checks.count(value, "number of transitions") for value in values], np.int64)
