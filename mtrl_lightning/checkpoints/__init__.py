"""The checkpoint file: its parts, reading and verification. Nothing in it is executed."""

from mtrl_lightning.checkpoints.reading import (
    FORMAT,
    check_complete,
    check_format,
    env_steps_of,
    load_checkpoint,
)

__all__ = ["FORMAT", "check_complete", "check_format", "env_steps_of", "load_checkpoint"]
