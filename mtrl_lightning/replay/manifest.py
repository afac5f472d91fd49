"""The manifest of a replay: which files of a run's folder hold its transitions.

A checkpoint carries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtrl_lightning.ranks.share import Share

MOVED = "moved"
"""Key of the rings of other ranks that a rank reads; it is never saved."""
HINT = "resume from another checkpoint, or without the replay (data.restore_replay false)"


def replay_folder(run_folder: Path) -> Path:
    """Return the folder of the replay in a run's folder."""
    return run_folder / "replay"


def reshard_manifests(
    manifests: Sequence[dict[str, Any] | None], share: Share
) -> dict[str, Any] | None:
    """Return the source manifest and ring of each ring of a rank.

    Args:
        manifests: of all saved ranks; None without a saved replay.
        share: the rank, and the environments that it takes over.
    """
    moved = []
    for saved_rank, manifest in enumerate(manifests):
        if not manifest:
            return None
        rings = [
            [source.env, env]
            for env, source in enumerate(share.saved_envs)
            if source.rank == saved_rank
        ]
        moved.append({"manifest": manifest, "rings": rings})
    return {MOVED: moved}
