"""The manifest of a replay: the files in the run folder that contain its transitions.

It is part of checkpoints.
"""

from __future__ import annotations

from pathlib import Path

HINT = "resume from another checkpoint, or without the replay (data.restore_replay false)"


def replay_folder(run_folder: Path) -> Path:
    """Return the folder of the replay in a run folder."""
    return run_folder / "replay"
