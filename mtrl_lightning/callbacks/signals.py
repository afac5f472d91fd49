"""Ctrl-C and SIGTERM, heard at once and acted on where the run's state is whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """The run was asked to end; its code is 128 plus the signal's number, as shells have it."""


class InterruptionCallback(Callback):
    """Remember a signal until a training batch has ended, then raise; a second one acts at once.

    Place it behind the callbacks that count and evaluate.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._former: dict[int, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen; only the main thread can."""
        if threading.current_thread() is threading.main_thread() and not self._former:
            self._received = None
            self._former = {number: signal.signal(number, self._hear) for number in SIGNALS}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Raise if a signal came."""
        self.check()

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal came."""
        if self._received is not None:
            raise Interrupted(128 + self._received)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop listening."""
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop listening."""
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        # Lightning puts this handler back when it has ended, after `_restore`: then it acts as if it were not there
        if not self._former or self._received is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self._received = number


def check_signals(trainer: Trainer) -> None:
    """Raise ``Interrupted`` if the trainer listens and a signal came; for long work between two training batches."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, InterruptionCallback):
            callback.check()
