"""The transitions that are learned from, in memory and on disk."""

from __future__ import annotations

import importlib
from typing import Any

from mtrl_lightning.replay.buffer import ReplayBuffer
from mtrl_lightning.replay.frames import FrameStorage
from mtrl_lightning.replay.rollout_buffer import RolloutBuffer
from mtrl_lightning.replay.snapshot import ReplaySnapshots

__all__ = ["FrameStorage", "ReplayBuffer", "ReplaySnapshots", "RolloutBuffer"]


def __getattr__(name: str) -> Any:
    """Return ``MultiTaskData``, which was defined here until 0.2."""
    if name != "MultiTaskData":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("mtrl_lightning.run.data").MultiTaskData
