"""Collections of episodes to learn from: written by ``collect``, read from disk."""

from mtrl_lightning.demonstrations.collecting import Collected, UniformPolicy, collect
from mtrl_lightning.demonstrations.collection import (
    Collection,
    CollectionFiles,
    check_collection,
    open_collection,
    read_collection,
    write_collection,
)
from mtrl_lightning.demonstrations.scripted import ScriptedPolicy

__all__ = [
    "Collected",
    "Collection",
    "CollectionFiles",
    "ScriptedPolicy",
    "UniformPolicy",
    "check_collection",
    "collect",
    "open_collection",
    "read_collection",
    "write_collection",
]
