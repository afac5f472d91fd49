"""The checkpoint file: what it holds, how it is read and verified. Nothing in it is executed."""

from mtrl_lightning.checkpoints.reading import (
    check_complete,
    check_format,
    env_steps_of,
    load_checkpoint,
)

__all__ = ["check_complete", "check_format", "env_steps_of", "load_checkpoint"]
