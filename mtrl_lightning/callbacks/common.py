"""What the callbacks of a run have in common."""

from __future__ import annotations

from typing import ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer

from mtrl_lightning.callbacks.trainer_options import check_trainer
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
        """Get the run's session.

        Raises:
            ConfigurationError: if the trainer has an option that a run does not follow.
        """
        check_trainer(trainer)
        self.session = Session.of(trainer, pl_module)
