"""Log what is learned, what is collected, and where the time goes."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.callbacks.common import data_of, find, log, step_complete
from mtrl_lightning.callbacks.csv_logger import MetricsCSV
from mtrl_lightning.callbacks.rollout import RolloutCallback
from mtrl_lightning.callbacks.wandb_logger import EnvStepWandbLogger
from mtrl_lightning.schedules import Every

ACTIVITIES = ("act", "step", "sample", "update", "evaluate", "checkpoint")


class MetricsCallback(Callback):
    """Write a row of ``train/``, ``rollout/`` and ``time/`` metrics on a schedule.

    Args:
        every: environment steps between two rows.

    Raises:
        ConfigurationError: if ``every`` is below 1.
    """

    def __init__(self, every: int = 1_000) -> None:
        self._every = Every(every, "metrics.every")
        self._since = (0.0, 0, 0)
        self._wandb_id: str | None = None
        self._csv_logger: MetricsCSV | None = None
        self._csv_fingerprint: dict[str, int] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the loggers the protocol and the x-axis; drop rows later than the checkpoint gone on from."""
        assert isinstance(pl_module, Algorithm)
        env_steps = pl_module.counters.env_steps
        protocol = {f"protocol/{key}": value for key, value in pl_module.spec.protocol.items()}
        versions = {
            f"version/{p}": importlib.metadata.version(p)
            for p in ("mtrl_lightning", "torch", "lightning")
        }
        rows: list[dict[str, float]] = []
        for logger in trainer.loggers:
            logger.log_hyperparams(protocol | versions)
            if isinstance(logger, MetricsCSV):
                logger.resume_from(env_steps, self._csv_fingerprint)
                rows = logger.rows()
                self._csv_logger = logger
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                self._wandb_id = logger.version
                logger.experiment.define_metric("env_steps")
                logger.experiment.define_metric("*", step_metric="env_steps")
            if isinstance(logger, EnvStepWandbLogger):
                logger.resume_from(rows, env_steps)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure; write a row first if an interruption kept the run from it."""
        assert isinstance(pl_module, Algorithm)
        pl_module.stopwatch.drain()
        self._since = (
            time.perf_counter(),
            pl_module.counters.env_steps,
            pl_module.counters.updates,
        )
        if pl_module.counters.updates > 0 and step_complete(trainer):
            self._log_if_due(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a row when it is time, and at the end."""
        assert isinstance(pl_module, Algorithm)
        if step_complete(trainer):
            self._log_if_due(trainer, pl_module, at_end=trainer.should_stop)

    def _log_if_due(self, trainer: Trainer, algorithm: Algorithm, at_end: bool = False) -> None:
        env_steps = algorithm.counters.env_steps
        due = self._every(env_steps)
        if due or at_end:
            so_far = algorithm.mean_metrics.state_dict()
            rollout = find(trainer, RolloutCallback).metrics(algorithm.spec.task_names)
            log(
                trainer,
                algorithm.drain_metrics() | rollout | self._time(trainer, algorithm),
                env_steps,
            )
            if (
                not due
            ):  # a run that goes on averages over the whole interval, as if it had not ended here
                algorithm.mean_metrics.load_state_dict(so_far)

    def _time(self, trainer: Trainer, algorithm: Algorithm) -> dict[str, float]:
        now, counters = time.perf_counter(), algorithm.counters
        then, env_steps, updates = self._since
        self._since = (now, counters.env_steps, counters.updates)
        seconds = algorithm.stopwatch.drain()
        buffer = data_of(trainer).buffer
        assert buffer is not None
        seconds["sample"] = buffer.stopwatch.drain().get("sample", 0.0)
        elapsed = max(now - then, 1e-9)
        rates = {
            "time/env_steps_per_second": (counters.env_steps - env_steps) / elapsed,
            "time/updates_per_second": (counters.updates - updates) / elapsed,
        }
        return rates | {
            f"time/{name}_fraction": seconds.get(name, 0.0) / elapsed for name in ACTIVITIES
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule, the W&B run, and what ``metrics.csv`` holds."""
        fingerprint = self._csv_logger.fingerprint() if self._csv_logger else None
        return {
            "every": self._every.state_dict(),
            "wandb_id": self._wandb_id,
            "metrics_csv": fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; the command line passes the W&B run on to its logger."""
        self._every.load_state_dict(state_dict["every"])
        self._wandb_id = state_dict["wandb_id"]
        self._csv_fingerprint = state_dict["metrics_csv"]

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let the loggers write what they hold: a run that goes on from the checkpoint does not log it again."""
        for logger in trainer.loggers:
            logger.save()
