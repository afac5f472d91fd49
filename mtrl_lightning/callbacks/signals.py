"""Stop a run where it can be saved, on all processes together."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer

from mtrl_lightning.callbacks.rollout import LAST, data_of
from mtrl_lightning.ranks import distributed
from mtrl_lightning.utils.requeue import requeue_signal

UNSAVED = b"\nInterrupted twice: the run ends at once, unsaved since its last checkpoint\n"


class SignalCallback(Callback):
    """Record a signal in ``TaskData.received_signal``; ``TaskData.check_signals`` raises it.

    It is checked where the run's state is complete and can be saved: before each update, and
    between the steps of longer work. A second signal ends the run immediately, without saving.

    With several processes, a signal to any of them interrupts all of them after the same vector
    step.

    Under SLURM, the requeue signal also interrupts the run. It replaces Lightning's handler, which
    would save in the middle of a step. Under SLURM, only a second Ctrl-C ends the run immediately,
    because SLURM sends SIGTERM as a warning and to jobs that it requeues.
    """

    order: ClassVar[int] = -1
    """First, because the ``on_train_start`` hooks of other callbacks may take long."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handlers, which Python allows only in the main thread.

        Lightning restores the previous handlers when it tears down the run.
        """
        data = data_of(trainer)
        data.received_signal = 0
        if threading.current_thread() is not threading.main_thread():
            return
        of_slurm = requeue_signal(trainer)

        def receive(number: int, frame: FrameType | None) -> None:
            if not data.received_signal:
                data.received_signal = number
            elif of_slurm is None or number == signal.SIGINT:
                os.write(2, UNSAVED)  # printing is not safe in a signal handler
                raise SystemExit(128 + number)

        for signum in {signal.SIGINT, signal.SIGTERM, of_slurm or signal.SIGTERM}:
            signal.signal(signum, receive)


class StopCallback(Callback):
    """Make all processes stop after the same update or evaluation if any requests a stop."""

    order: ClassVar[int] = LAST + 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Postpone a requested stop until all processes have been notified."""
        data_of(trainer).defer_stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop all processes if any requests a stop."""
        trainer.should_stop = distributed.is_any(trainer.should_stop)
