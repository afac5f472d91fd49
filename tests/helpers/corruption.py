"""Copies of runs, to be damaged or continued."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def copy_run(source: Path, target: Path) -> None:
    """Copy a run's folder with the names that are links to the same file."""
    shutil.copytree(source, target)
    for alias in ("last.ckpt", "best.ckpt"):
        path = target / "checkpoints" / alias
        for other in (source / "checkpoints").glob("step_*.ckpt"):
            if path.exists() and other.samefile(source / "checkpoints" / alias):
                path.unlink()
                os.link(target / "checkpoints" / other.name, path)
