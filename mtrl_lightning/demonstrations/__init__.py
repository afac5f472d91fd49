"""Demonstrations: collected with a policy, written and read as Minari data sets."""

from mtrl_lightning.demonstrations.collecting import Collected, UniformPolicy, collect
from mtrl_lightning.demonstrations.minari_files import (
    RecordedEpisode,
    TaskDataSet,
    open_data_sets,
    write_data_sets,
)
from mtrl_lightning.demonstrations.scripted import ScriptedPolicy

__all__ = [
    "Collected",
    "RecordedEpisode",
    "ScriptedPolicy",
    "TaskDataSet",
    "UniformPolicy",
    "collect",
    "open_data_sets",
    "write_data_sets",
]
