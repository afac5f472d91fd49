"""Index of the replay files that each checkpoint needs.

Because any callback may save checkpoints anywhere, their paths and replay manifests are recorded in
``replay/index.json`` in the run folder, relative to that folder, so that runs can be moved.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

INDEX = "index.json"


def replay_folder(run_folder: Path) -> Path:
    """Return the folder of the replay in a run folder."""
    return run_folder / "replay"


def note_checkpoint(folder: Path, checkpoint: Path, manifest: dict[str, Any] | None) -> None:
    """Record the manifest of a new checkpoint, and remove entries of deleted checkpoints.

    Args:
        folder: folder of the run's replay.
        checkpoint: the checkpoint file.
        manifest: manifest of the replay; None for a checkpoint without one.
    """
    if manifest is None and not (folder / INDEX).exists():
        return
    entries = _entries(folder)
    present = {path: of for path, of in entries.items() if (folder / path).exists()}
    present[os.path.relpath(checkpoint.resolve(), folder.resolve())] = manifest
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{INDEX}.unfinished"
    unfinished.write_text(json.dumps(present))
    unfinished.replace(folder / INDEX)


def needed_manifests(folder: Path) -> list[dict[str, Any]]:
    """Return the manifests of all checkpoints that still exist."""
    return [
        manifest
        for path, manifest in _entries(folder).items()
        if manifest is not None and (folder / path).exists()
    ]


def _entries(folder: Path) -> dict[str, dict[str, Any] | None]:
    try:
        entries: dict[str, dict[str, Any] | None] = json.loads((folder / INDEX).read_text())
        return entries
    except FileNotFoundError:
        return {}
