"""Collections of episodes to learn from: written by ``collect``, read from disk."""

from mtrl_lightning.demonstrations.collection import (
    Collection,
    check_collection,
    read_collection,
    write_collection,
)

__all__ = ["Collection", "check_collection", "read_collection", "write_collection"]
