"""End a run where it can be saved, on all processes together."""

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
    """Note a signal in ``TaskData.received_signal``; ``TaskData.check_signals`` raises it.

    That is checked where the run's state is complete and can be saved: before each update, and
    between the steps of longer work. A second signal ends the run at once, unsaved.

    With several processes, a signal that one of them has received interrupts all of them after the
    same vector step.

    Under SLURM, the requeue signal interrupts the run, too. Lightning's handler for it is replaced,
    because it saves in the middle of a step. There only a second Ctrl-C ends the run at once: SLURM
    sends SIGTERM as a warning, and to a job that it requeues.
    """

    order: ClassVar[int] = -1
    """First: what comes next in ``on_train_start`` may take long."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handlers; Python allows that only in the main thread.

        Lightning restores the previous ones when it tears down the run.
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
                os.write(2, UNSAVED)  # printing is not safe while a signal is handled
                raise SystemExit(128 + number)

        for signum in {signal.SIGINT, signal.SIGTERM, of_slurm or signal.SIGTERM}:
            signal.signal(signum, receive)


class StopCallback(Callback):
    """Let all processes stop after the same update or evaluation, whichever of them asks for it."""

    order: ClassVar[int] = LAST + 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Postpone a stop until all processes know of it."""
        data_of(trainer).defer_stop()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop all processes if any wants to stop."""
        trainer.should_stop = distributed.is_any(trainer.should_stop)
