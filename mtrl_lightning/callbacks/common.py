"""What the callbacks of a run have in common."""

from __future__ import annotations

from typing import ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.session import Session


class SessionCallback(Callback):
    """A callback that belongs to a run and gets its ``Session`` before anything starts."""

    key: ClassVar[str]
    """Name of its state in a checkpoint."""
    session: Session

    @property
    def state_key(self) -> str:
        """Return the name of its state in a checkpoint, which does not depend on its options."""
        return self.key

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Get the run's session."""
        self.session = Session.of(trainer, pl_module)


def check_trainer(trainer: Trainer) -> None:
    """Check that the trainer's options are among those that the algorithms work with.

    Raises:
        ConfigurationError: naming the option to change.
    """
    if trainer.world_size > 1:
        raise ConfigurationError(
            "training on several devices is not supported yet:"
            " set trainer.devices and num_nodes to 1"
        )
    if trainer.precision not in ("32-true", "bf16-mixed"):
        raise ConfigurationError(
            f"trainer.precision is {trainer.precision}: 32-true and bf16-mixed are supported"
        )
