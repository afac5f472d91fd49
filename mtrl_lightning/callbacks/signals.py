"""Interrupt a run by Ctrl-C, SIGTERM or SLURM's requeue signal where it can be saved."""

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
from mtrl_lightning.callbacks.loggers.wandb_logger import EnvStepWandbLogger
from mtrl_lightning.errors import Interrupted
from mtrl_lightning.ranks import distributed

SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNSAVED = b"\nInterrupted twice: the run ends at once, unsaved since its last checkpoint\n"


class InterruptionCallback(SessionCallback):
    """Record a signal, and raise ``Interrupted`` at the next ``check``.

    ``check`` is called where the run's state is complete and can be saved: at the end of a training
    batch, and between the steps of longer work. A second signal ends the run at once, unsaved.

    With several processes, a signal that one of them has received interrupts all of them after the
    same vector step.

    Under SLURM, the requeue signal interrupts the run too. Lightning's handler for it is replaced,
    because it saves in the middle of a step. There only a second Ctrl-C ends the run at once: SLURM
    sends SIGTERM as a warning, and to a job that it requeues.

    Args:
        restart_id: identifies the run in its checkpoints for a scheduler that restarts it; None
            saves nothing.
    """

    key = "interruption"

    def __init__(self, restart_id: dict[str, str] | None = None) -> None:
        self._restart_id = restart_id
        self._received: int | None = None
        self._requeue_signal: int | None = None
        self._replaced_handlers: dict[int, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register with the session, which checks for a signal where the run's state is whole."""
        super().setup(trainer, pl_module, stage)
        self.session.signals = self

    @property
    def received_signal(self) -> int:
        """Number of the signal that this process has received; 0 for none."""
        return self._received or 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install the handler; Python allows that only in the main thread."""
        if threading.current_thread() is not threading.main_thread() or self._replaced_handlers:
            return
        self._received = None
        self._requeue_signal = requeue_signal(trainer)
        signums: set[int] = set(SIGNALS)
        if self._requeue_signal is not None:
            signums.add(self._requeue_signal)
        self._replaced_handlers = {
            signum: signal.signal(signum, self._receive) for signum in signums
        }

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the handler that Lightning has installed since, which ends the run unsaved."""
        for signum in self._replaced_handlers:
            signal.signal(signum, self._receive)

    def check(self) -> None:
        """Raise ``Interrupted`` if a signal was received; the run's state must be complete."""
        received = self._received
        if distributed.world_size() > 1:
            received = self.session.rank_status.signal or None
        if received is not None:
            raise Interrupted(128 + received)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the handlers; under SLURM only after the interrupted run is saved."""
        if self._requeue_signal is None or not isinstance(exception, Interrupted):
            self._restore()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the job and command line, by which a requeued job finds the checkpoint."""
        if self._restart_id is not None:
            checkpoint["origin"] = dict(self._restart_id)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the handlers."""
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._replaced_handlers.items():
            signal.signal(signum, handler)
        self._replaced_handlers = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_second = self._received is not None
        under_slurm = self._requeue_signal is not None
        if is_second and under_slurm and number != signal.SIGINT:
            return
        if is_second and number == signal.SIGTERM and self._is_stopped_by_wandb():
            return
        # Lightning reinstalls this handler at its end, after `_restore`: then it acts as Python's
        is_installed = bool(self._replaced_handlers)
        if not is_installed:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if is_second:
            os.write(2, UNSAVED)  # printing is not safe while a signal is handled
            raise SystemExit(128 + number)
        self._received = number

    def _is_stopped_by_wandb(self) -> bool:
        """Return whether W&B has stopped the run; its agent then sends SIGTERM as well."""
        loggers = self.session.loggers
        return any(isinstance(one, EnvStepWandbLogger) and one.is_stopped for one in loggers)


def slurm_job() -> str | None:
    """Return the SLURM job's id for ``scontrol``; None elsewhere and in an interactive job."""
    if not SLURMEnvironment.detect():
        return None
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def requeue_signal(trainer: Trainer) -> int | None:
    """Return SLURM's requeue signal; None outside SLURM, or if auto-requeue is off in Lightning."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal


def requeue(trainer: Trainer, interrupted: Interrupted) -> None:
    """Requeue the SLURM job if the requeue signal interrupted the run, which is saved by now."""
    signum = requeue_signal(trainer)
    job = slurm_job()
    if signum is None or job is None or not trainer.is_global_zero:
        return
    if interrupted.code != 128 + signum:
        return
    try:
        failure: object = subprocess.call(["scontrol", "requeue", job])
    except OSError as error:
        failure = error
    if failure:
        rank_zero_warn(
            f"scontrol requeue {job} failed ({failure}): resubmit the job with --ckpt_path last"
        )
    else:
        rank_zero_info(f"Requeued SLURM job {job}: its next start continues from here")
