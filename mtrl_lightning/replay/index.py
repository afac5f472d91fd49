"""Which checkpoints need which files of a replay.

Any callback may save a checkpoint anywhere, so its path and the manifest of its replay are noted in
``replay/index.json`` of the run's folder. Paths are relative to that, so that a run can be moved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INDEX = "index.json"


def note_checkpoint(folder: Path, checkpoint: Path, manifests: Sequence[dict[str, Any]]) -> None:
    """Note the manifests of a new checkpoint, and forget checkpoints that are gone.

    Args:
        folder: of the run's replay.
        checkpoint: the file.
        manifests: of the replay of each process.
    """
    if not manifests and not (folder / INDEX).exists():
        return
    entries = _entries(folder)
    present = {path: of for path, of in entries.items() if (folder / path).exists()}
    present[os.path.relpath(checkpoint.resolve(), folder.resolve())] = list(manifests)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{INDEX}.unfinished"
    unfinished.write_text(json.dumps(present))
    unfinished.replace(folder / INDEX)


def needed_manifests(folder: Path) -> list[dict[str, Any]]:
    """Return the manifests of all checkpoints that still exist."""
    return [
        manifest
        for path, manifests in _entries(folder).items()
        if (folder / path).exists()
        for manifest in manifests
    ]


def _entries(folder: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        entries: dict[str, list[dict[str, Any]]] = json.loads((folder / INDEX).read_text())
        return entries
    except FileNotFoundError:
        return {}
