"""Gymnasium environments and how many are stepped at once. Nothing here imports torch."""

from mtrl_lightning.envs.benchmark import Benchmark
from mtrl_lightning.envs.dm_control import DMControl
from mtrl_lightning.envs.dm_families import DMControlFamily
from mtrl_lightning.envs.gymnasium_tasks import GymnasiumTasks
from mtrl_lightning.envs.metaworld import MetaWorld
from mtrl_lightning.envs.padding import Padded, PaddedSpaces, pad_to_spec, padded_spaces
from mtrl_lightning.envs.pixels import Pixels
from mtrl_lightning.envs.toy import ToyConflict, ToyReach
from mtrl_lightning.envs.vector import VectorEnv
from mtrl_lightning.envs.wrapped import WithWrappers

__all__ = [
    "Benchmark",
    "DMControl",
    "DMControlFamily",
    "GymnasiumTasks",
    "MetaWorld",
    "Padded",
    "PaddedSpaces",
    "Pixels",
    "ToyConflict",
    "ToyReach",
    "VectorEnv",
    "WithWrappers",
    "pad_to_spec",
    "padded_spaces",
]
