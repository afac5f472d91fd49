"""The checkpoint file: its parts, and reading it. Nothing in it is executed."""

from mtrl_lightning.checkpoints.reading import (
    FORMAT,
    check_complete,
    env_steps_of,
    load_checkpoint,
    restoring,
)

__all__ = ["FORMAT", "check_complete", "env_steps_of", "load_checkpoint", "restoring"]
