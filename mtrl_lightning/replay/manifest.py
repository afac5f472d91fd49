"""The manifest of a replay: which files of a run's folder hold its transitions.

A checkpoint carries it.
"""

from __future__ import annotations

from pathlib import Path

HINT = "resume from another checkpoint, or without the replay (data.restore_replay false)"


def replay_folder(run_folder: Path) -> Path:
    """Return the folder of the replay in a run's folder."""
    return run_folder / "replay"
