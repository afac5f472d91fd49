"""Benchmarks of Gymnasium environments, and vector environments. Torch is not imported."""

from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.envs.benchmarks.dm_control import DMControl
from mtrl_lightning.envs.benchmarks.dm_families import DMControlFamily
from mtrl_lightning.envs.benchmarks.gymnasium_tasks import GymnasiumTasks
from mtrl_lightning.envs.benchmarks.metaworld import MetaWorld
from mtrl_lightning.envs.benchmarks.padding import Padded, PaddedSpaces, pad_to_spec, padded_spaces
from mtrl_lightning.envs.benchmarks.toy import ToyConflict, ToyReach
from mtrl_lightning.envs.benchmarks.wrappers import WithWrappers
from mtrl_lightning.envs.render.pixels import Pixels
from mtrl_lightning.envs.vector.vector import VectorEnv

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
