"""The callback that steps the training environments."""

from __future__ import annotations

from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from mtrl_lightning.data import TaskData
from mtrl_lightning.errors import ConfigurationError


class RolloutCallback(Callback):
    """Make the data module step its environments in Lightning's hooks.

    =========================  =========================================================
    hook                       action
    =========================  =========================================================
    ``on_train_start``         episodes start or continue
    ``on_train_epoch_start``   off-policy: warm-up; on-policy: an iteration is collected
    ``on_train_batch_start``   off-policy: step until this update is due; the last step is
                               only sent to the workers
    ``training_step``          the update is made while the workers step
    ``on_train_batch_end``     the step is received: no steps are pending afterwards
    =========================  =========================================================

    It has no options and no state, and precedes all other callbacks except ``ResetCallback``, so
    that any of them can save a checkpoint.
    """

    order: ClassVar[int] = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sort the callbacks: this package's first, by their ``order``."""
        data_of(trainer)
        # a new list: Lightning is iterating over the current one
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = sorted(  # type: ignore[attr-defined]
            callbacks, key=lambda callback: getattr(callback, "order", LAST)
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start or continue the episodes; a finished run makes no update."""
        data = data_of(trainer)
        data.begin()
        trainer.should_stop = trainer.should_stop or data.is_over

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warm up, or collect an iteration."""
        data_of(trainer).begin_epoch()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Step until this update is due; the last step runs during the update."""
        data_of(trainer).begin_update()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Receive the step that ran during the update."""
        data = data_of(trainer)
        data.end_update()
        trainer.should_stop = trainer.should_stop or data.is_over


LAST = 10
"""Order of callbacks without ``order``."""


def data_of(trainer: Trainer) -> TaskData:
    """Return the trainer's data module."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if not isinstance(data, TaskData):
        raise ConfigurationError(
            "the trainer has no data module of this package: pass one, as in"
            " trainer.fit(SAC(benchmark.spec), ReplayData(benchmark))"
        )
    return data


def is_fitting(trainer: Trainer) -> bool:
    """Return whether the trainer is training, and not in the sanity check."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
