"""Callbacks that interrupt one of a run's processes, and that save what was restored."""

from __future__ import annotations

import atexit
import os
import signal
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from mtrl_lightning.errors import Interrupted


class Signal(Callback):
    """Send it to the process itself once, after an update or a vector step, and print that.

    After SIGTERM the first process ends later than the others, as with a logger that uploads.

    Args:
        number: of the signal.
        rank: of the process.
        env_steps: from which on.
        after_step: whether after a vector step.
    """

    def __init__(self, number: int, rank: int, env_steps: int, after_step: bool = False) -> None:
        self._number = number
        self._rank = rank
        self._env_steps = env_steps
        self._after_step = after_step
        self._is_sent = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._number == signal.SIGTERM:
            atexit.register(time.sleep, 6)  # Lightning looks for ended processes every 5 s
        if self._after_step:
            trainer.datamodule.after_step.append(lambda _: self._send(trainer))  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not self._after_step:
            self._send(trainer)

    def _send(self, trainer: Trainer) -> None:
        env_steps = trainer.datamodule.counters.env_steps  # type: ignore[attr-defined]
        if trainer.global_rank == self._rank and env_steps >= self._env_steps and not self._is_sent:
            self._is_sent = True
            print("sent", flush=True)
            os.kill(os.getpid(), self._number)


class StopOnRankOne(Callback):
    """Ask for the end of training on the second process alone, from 100 environment steps on."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        env_steps = trainer.datamodule.counters.env_steps  # type: ignore[attr-defined]
        trainer.should_stop |= trainer.global_rank == 1 and env_steps >= 100


class Resave(Callback):
    """Save a resumed run before its next step, and end it as a signal does.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self._path)
        raise Interrupted(128 + signal.SIGTERM)
