"""Callbacks that interrupt one of a run's processes, and that save what was restored."""

import atexit
import os
import signal
import time

from lightning.pytorch import Callback

from mtrl_lightning.errors import Interrupted


class Signal(Callback):
    """Send a signal to the process of a rank once, after an update or a vector step.

    After SIGTERM the first process that Lightning started ends later than the others, as with a
    logger that uploads.
    """

    def __init__(self, number: int, rank: int, env_steps: int, after_step: bool = False):
        self._number = number
        self._rank = rank
        self._env_steps = env_steps
        self._after_step = after_step
        self._is_sent = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"

    def on_train_start(self, trainer, pl_module):
        if trainer.is_global_zero and self._number == signal.SIGTERM:
            atexit.register(time.sleep, 6)  # Lightning looks for ended processes every 5 s
        if self._after_step:
            trainer.datamodule.after_step.append(lambda _: self._send(trainer))

    def on_train_batch_end(self, trainer, *_):
        if not self._after_step:
            self._send(trainer)

    def _send(self, trainer):
        is_time = trainer.datamodule.counters.env_steps >= self._env_steps
        if trainer.global_rank == self._rank and is_time and not self._is_sent:
            self._is_sent = True
            os.kill(os.getpid(), self._number)


class StopOnRankOne(Callback):
    """Ask for the end of training on the second process alone, from 100 environment steps on."""

    def __init__(self, hook: str):
        setattr(self, hook, self._stop)

    def _stop(self, trainer, *_):
        env_steps = trainer.datamodule.counters.env_steps
        trainer.should_stop |= trainer.global_rank == 1 and env_steps >= 100


class Resave(Callback):
    """Save a resumed run to this path before its next step, and end it as a signal does."""

    def __init__(self, path: str):
        self._path = path

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(self._path)
        raise Interrupted(128 + signal.SIGTERM)
