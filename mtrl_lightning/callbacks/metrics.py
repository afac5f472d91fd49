"""Log metrics of learning, of rollouts, of where the time goes, and of the machine's load."""

from __future__ import annotations

import contextlib
import platform
import time
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.callbacks.loggers.csv_logger import MetricsCSV
from mtrl_lightning.callbacks.loggers.wandb_logger import EnvStepWandbLogger
from mtrl_lightning.callbacks.rollout_metrics import (
    episode_metrics,
    fault_metrics,
    joined_windows,
    rollout_metrics,
)
from mtrl_lightning.errors import installed_versions
from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout.evaluator import metric_names
from mtrl_lightning.run.registered import StepAction
from mtrl_lightning.schedules import Every

ACTIVITIES = ("act", "step", "sample", "update", "evaluate", "checkpoint")
OF_ENVS = ("time/env_steps_per_second", "time/act_fraction", "time/step_fraction")
"""Times of runs that step environments."""
PACKAGES = ("mtrl_lightning", "torch", "lightning", "gymnasium", "numpy")
"""Whose versions a run records, beside that of Python."""
GIBIBYTE = 1 << 30


class MetricsCallback(SessionCallback):
    """Write a row of ``train/``, ``rollout/``, ``fault/`` and ``time/`` metrics on a schedule.

    Args:
        every: environment steps between two rows.
        system: whether a row also has ``system/``: the load of the processor and the memory that
            this process and its workers use.
    """

    key = "metrics"

    def __init__(self, every: int = 1_000, system: bool = False) -> None:
        self._every = Every(every, "metrics.every")
        self._system = SystemUse() if system else None
        self._measured_at = 0.0
        self._measured_env_steps = 0
        self._measured_updates = 0
        self._wandb_id: str | None = None
        self._csv_logger: MetricsCSV | None = None
        self._csv_fingerprint: dict[str, int] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register the metrics with the session, and let loggers know its environment steps."""
        super().setup(trainer, pl_module, stage)
        session = self.session
        session.after_updates["log_metrics"] = StepAction(self.log_if_due)
        for logger in session.loggers:
            if isinstance(logger, (MetricsCSV, EnvStepWandbLogger)):
                logger.count_env_steps = lambda: session.counters.env_steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start logging in a new run."""
        if not trainer.ckpt_path:
            self._start_logging()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start logging in a continued run.

        Everything is restored by now: a run that cannot continue leaves its files unchanged.
        """
        if trainer.ckpt_path:
            self._start_logging()

    def _start_logging(self) -> None:
        """Log the protocol, define the x-axis, and drop rows later than the checkpoint."""
        env_steps = self.session.counters.env_steps
        protocol = {f"protocol/{key}": value for key, value in self.session.spec.protocol.items()}
        installed = installed_versions(PACKAGES) | {"python": platform.python_version()}
        versions = {f"version/{name}": version for name, version in installed.items()}
        rows: list[dict[str, float]] = []
        loggers = self.session.loggers
        for logger in loggers:
            logger.log_hyperparams(protocol | versions)
            if isinstance(logger, MetricsCSV):
                logger.resume_from(env_steps, self._csv_fingerprint)
                rows = logger.rows()
                self._csv_logger = logger
        for logger in loggers:
            if isinstance(logger, EnvStepWandbLogger):
                logger.continue_from(self._wandb_id, env_steps)
                logger.is_interrupted = lambda: self.session.received_signal != 0
                logger.define_metrics(metric_names(self.session.benchmark))
                logger.resume_from(rows, env_steps)
            elif isinstance(logger, WandbLogger):
                logger.experiment.define_metric("env_steps")
                logger.experiment.define_metric("*", step_metric="env_steps")
            if isinstance(logger, WandbLogger):
                self._wandb_id = logger.version
        self.session.stopwatch.drain()
        self._start_interval()

    def log_if_due(self, env_steps: int, at_end: bool) -> None:
        """Write a row when it is due, and at the end."""
        is_due = self._every(env_steps)
        if not is_due and not at_end:
            return
        session = self.session
        algorithm = session.algorithm
        so_far = algorithm.mean_metrics.state_dict()
        trained = algorithm.drain_metrics()  # first: it counts the steps that a GPU has skipped
        rollout = fault_metrics(session)
        if session.has_envs:
            windows = joined_windows(session)
            rollout |= rollout_metrics(session, windows) | episode_metrics(session, windows)
        system = {} if self._system is None else self._system.metrics(algorithm.device)
        session.log(trained | rollout | self._time() | system)
        if not is_due:
            # a run that is extended averages over the whole interval, as if it had not ended
            algorithm.mean_metrics.load_state_dict(so_far)

    def _time(self) -> dict[str, float]:
        counters = self.session.counters
        elapsed = max(time.perf_counter() - self._measured_at, 1e-9)
        env_steps = counters.env_steps - self._measured_env_steps
        updates = counters.updates - self._measured_updates
        self._start_interval()
        seconds = self.session.stopwatch.drain()
        rates = {
            "time/env_steps_per_second": env_steps / elapsed,
            "time/updates_per_second": updates / elapsed,
        }
        fractions = {
            f"time/{name}_fraction": seconds.get(name, 0.0) / elapsed for name in ACTIVITIES
        }
        times = rates | fractions
        if self.session.has_envs:
            return times
        return {name: value for name, value in times.items() if name not in OF_ENVS}

    def _start_interval(self) -> None:
        self._measured_at = time.perf_counter()
        self._measured_env_steps = self.session.counters.env_steps
        self._measured_updates = self.session.counters.updates

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule, the W&B run and the fingerprint of ``metrics.csv``."""
        fingerprint = None if self._csv_logger is None else self._csv_logger.fingerprint()
        return {
            "every": self._every.state_dict(),
            "wandb_id": self._wandb_id,
            "metrics_csv": fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule, the W&B run and the expected fingerprint of ``metrics.csv``."""
        self._every.load_state_dict(state_dict["every"])
        self._wandb_id = state_dict["wandb_id"]
        self._csv_fingerprint = state_dict["metrics_csv"]

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Flush the loggers: a continued run does not log these rows a second time."""
        with distributed.raise_on_all_ranks(OSError):
            for logger in self.session.loggers:
                logger.save()


class SystemUse:
    """Measure the machine's load since the last measurement, and the memory in use."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first value has no interval

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Return ``system/`` metrics.

        Args:
            device: that trains.
        """
        this_process = psutil.Process()
        memory = 0
        for process in [this_process, *this_process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                memory += process.memory_info().rss
        metrics = {
            "system/cpu_percent": psutil.cpu_percent(),
            "system/memory_gib": memory / GIBIBYTE,
        }
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            metrics["system/gpu_memory_gib"] = (total - free) / GIBIBYTE
        return metrics
