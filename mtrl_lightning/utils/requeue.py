"""Requeue an interrupted run in SLURM or a W&B sweep."""

from __future__ import annotations

import os
import signal
import subprocess

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from mtrl_lightning.errors import Interrupted


def slurm_job() -> str | None:
    """Return the SLURM job ID for ``scontrol``; None outside SLURM or in an interactive job."""
    if not SLURMEnvironment.detect():
        return None
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def requeue_signal(trainer: Trainer) -> int | None:
    """Return SLURM's requeue signal; None outside SLURM, or if Lightning's auto-requeue is off."""
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal


def requeue(trainer: Trainer, exception: BaseException) -> None:
    """Requeue a SLURM job interrupted by its requeue signal; mark a W&B sweep run as preempted.

    Called by the data module after callbacks have saved the run, because SLURM then ends the job.
    """
    if not isinstance(exception, Interrupted) or not trainer.is_global_zero:
        return
    signum = int(exception.code or 0) - 128
    for logger in trainer.loggers:
        run = logger.experiment if isinstance(logger, WandbLogger) else None
        if run is None or run.disabled or run.sweep_id is None:
            continue
        if signum != signal.SIGINT:
            run.mark_preempting()
        run.finish(exit_code=exception.code)  # W&B does not get the exit code of exceptions
    job = slurm_job()
    if job is None or signum != requeue_signal(trainer):
        return
    try:
        failure: object = subprocess.call(["scontrol", "requeue", job])
    except OSError as error:
        failure = error
    if failure:
        rank_zero_warn(f"scontrol requeue {job} failed ({failure}): resubmit the job")
    else:
        rank_zero_info(f"Requeued SLURM job {job}: it resumes from here when it restarts")
