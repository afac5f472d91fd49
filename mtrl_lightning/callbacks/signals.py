"""Ctrl-C, SIGTERM and SLURM's requeue signal, heard at once and acted on where the run's state is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mtrl_lightning.callbacks.common import SessionCallback

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """The run was asked to end; its code is 128 plus the signal's number, as shells have it."""


class InterruptionCallback(SessionCallback):
    """Remember a signal until a training batch has ended, then raise; a second one acts at once.

    Under SLURM its requeue signal is heard too, in place of Lightning's handler, which would save
    in the middle of a step. There only a second Ctrl-C acts at once: SLURM sends SIGTERM as a
    warning, and to a job that is requeued.

    Args:
        origin: the job and command line that checkpoints are marked with; null for no mark.
    """

    key = "interruption"

    def __init__(self, origin: dict[str, str] | None = None) -> None:
        self._origin = origin
        self._received: int | None = None
        self._requeue_signal: int | None = None
        self._former: dict[int, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the check with the session, which is made where the run's state is whole."""
        super().setup(trainer, pl_module, stage)
        self.session.check_signals = self.check

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to listen; only the main thread can."""
        if threading.current_thread() is threading.main_thread() and not self._former:
            self._received, self._requeue_signal = None, requeue_signal(trainer)
            numbers = {*SIGNALS, *([] if self._requeue_signal is None else [self._requeue_signal])}
            self._former = {number: signal.signal(number, self._hear) for number in numbers}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the place of Lightning's handler, after which a SIGTERM between two batches ends the run unsaved."""
        for number in self._former:
            signal.signal(number, self._hear)

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal came."""
        if self._received is not None:
            raise Interrupted(128 + self._received)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop listening, unless the run is saved and SLURM's further signals must not disturb that."""
        if self._requeue_signal is None or not isinstance(exception, Interrupted):
            self._restore()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Mark the checkpoint, so that a requeued job finds it."""
        if self._origin is not None:
            checkpoint["origin"] = dict(self._origin)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop listening."""
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if (
            self._received is not None
            and self._requeue_signal is not None
            and number != signal.SIGINT
        ):
            return
        # Lightning puts this handler back when it has ended, after `_restore`: then it acts as if
        # it were not there
        if not self._former or self._received is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        self._received = number


def slurm_job() -> str | None:
    """Return the id of the SLURM job as ``scontrol`` takes it; None elsewhere, and in an interactive job."""
    if not SLURMEnvironment.detect():
        return None
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return (
        f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")
    )


def requeue_signal(trainer: Trainer) -> int | None:
    """Return the signal that asks for a requeue; None outside SLURM, or where Lightning's auto-requeue is off."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal


def requeue(trainer: Trainer, interrupted: Interrupted) -> None:
    """Let SLURM start the job again if its requeue signal interrupted the run, which by now is saved."""
    number, job = requeue_signal(trainer), slurm_job()
    if (
        number is None
        or job is None
        or interrupted.code != 128 + number
        or not trainer.is_global_zero
    ):
        return
    try:
        failure: object = subprocess.call(["scontrol", "requeue", job])
    except OSError as error:
        failure = error
    if failure:
        rank_zero_warn(
            f"scontrol requeue {job} failed ({failure}): submit the job again with --ckpt_path last"
        )
    else:
        rank_zero_info(f"Requeued SLURM job {job}: its next start goes on from here")
