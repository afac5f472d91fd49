"""Replay and rollout buffers, in memory and on disk."""

from mtrl_lightning.replay.buffer import ReplayBuffer
from mtrl_lightning.replay.frames import FrameStorage
from mtrl_lightning.replay.rollout_buffer import RolloutBuffer
from mtrl_lightning.replay.snapshot import ReplaySnapshots

__all__ = ["FrameStorage", "ReplayBuffer", "ReplaySnapshots", "RolloutBuffer"]
