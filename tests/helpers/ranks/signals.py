"""A callback that sends a signal to one of a run's processes."""

from __future__ import annotations

import atexit
import os
import signal
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Signal(Callback):
    """Send it to the process itself once, after an update, and print that.

    After SIGTERM the first process ends later than the others, as with a logger that uploads.

    Args:
        number: of the signal.
        rank: of the process.
        env_steps: from which on.
    """

    def __init__(self, number: int, rank: int, env_steps: int) -> None:
        self._number = number
        self._rank = rank
        self._env_steps = env_steps
        self._is_sent = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._number == signal.SIGTERM:
            atexit.register(time.sleep, 6)  # Lightning looks for ended processes every 5 s

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        env_steps = trainer.datamodule.counters.env_steps  # type: ignore[attr-defined]
        if trainer.global_rank == self._rank and env_steps >= self._env_steps and not self._is_sent:
            self._is_sent = True
            print("sent", flush=True)
            os.kill(os.getpid(), self._number)
