"""Base class of a run's callbacks, and warnings in place of errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.callbacks.trainer_options import check_trainer
from mtrl_lightning.run.session import Session


class WarnOnce:
    """Let training continue after an error in a block that only shows results.

    The first error of a kind is a warning; the others pass in silence.
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def __call__(
        self, failure: str, *, continuation: str, kind: str = "", hint: str = ""
    ) -> Iterator[None]:
        """Return the context of the block.

        Args:
            failure: beginning of the warning.
            continuation: a clause about the next attempt, after "Training continues, and".
            kind: of the errors.
            hint: a sentence in the warning; empty for none.
        """
        try:
            yield
        except Exception as error:
            if kind not in self._warned:
                sentences = [
                    f"{failure} ({type(error).__name__}: {error}).",
                    hint,
                    f"Training continues, and {continuation}; there is no further warning",
                ]
                rank_zero_warn(" ".join(filter(None, sentences)))
            self._warned.add(kind)


class SessionCallback(Callback):
    """A callback that belongs to a run and gets its ``Session`` before anything starts."""

    key: ClassVar[str]
    """Name of its state in a checkpoint."""
    learning_options: ClassVar[tuple[str, ...]] = ()
    """Arguments that affect training: a continued run warns if one differs."""
    session: Session

    @property
    def state_key(self) -> str:
        """Return the name of its state in a checkpoint, which does not depend on its options."""
        return self.key

    @property
    def is_restoring(self) -> bool:
        """Whether the run restores a checkpoint."""
        return hasattr(self, "session") and self.session.is_restoring

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Get the run's session.

        Raises:
            ConfigurationError: if the trainer has an option that a run does not follow.
        """
        check_trainer(trainer)
        self.session = Session.of(trainer, pl_module)
