"""Log metrics of training, rollouts and timing."""

from __future__ import annotations

import platform
import time
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_warn

from mtrl_lightning.algorithms.arguments import OWN_CLASS
from mtrl_lightning.callbacks.metrics_file import MetricsFile, log_row
from mtrl_lightning.callbacks.rollout import data_of
from mtrl_lightning.callbacks.rollout_metrics import episode_metrics, joined_windows
from mtrl_lightning.data import EnvData, TaskData
from mtrl_lightning.data.run_checks import is_better_when_larger
from mtrl_lightning.errors import installed_versions
from mtrl_lightning.ranks import distributed
from mtrl_lightning.rollout.evaluator import metric_names
from mtrl_lightning.schedules import Every, round_up

ACTIVITIES = ("act", "step", "sample", "update", "evaluate", "checkpoint")
OF_ENVS = ("time/env_steps_per_second", "time/act_fraction", "time/step_fraction")
"""Timers of runs that step environments."""
PACKAGES = ("mtrl_lightning", "torch", "lightning", "gymnasium", "numpy")
"""Packages whose versions a run records, in addition to Python's."""


class MetricsCallback(Callback):
    """Log a row of ``train/``, ``rollout/``, ``fault/`` and ``time/`` metrics on a schedule.

    They are logged to all loggers of the trainer and to ``metrics.jsonl`` in the run folder.

    Args:
        every: environment steps between two rows; None for a 200th of the run.
    """

    order: ClassVar[int] = 3

    def __init__(self, every: int | None = None) -> None:
        self._interval = every
        self._every = Every(1 if every is None else every, "metrics.every")
        self._file: MetricsFile | None = None
        self._logged_at = -1
        self._measured_at = 0.0
        self._measured_env_steps = 0
        self._measured_updates = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Add ``metrics.jsonl`` to the trainer's loggers."""
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        data = data_of(trainer)
        if self._interval is None:
            num_tasks = len(data.spec.train_tasks)
            num_envs = data.num_envs if isinstance(data, EnvData) else num_tasks
            self._every.interval = round_up(max(num_envs, data.total_steps // 200))
        files = [logger for logger in trainer.loggers if isinstance(logger, MetricsFile)]
        if not files:
            files = [MetricsFile(data.folder)]
            trainer.loggers = [*files, *trainer.loggers]
        self._file = files[0]
        self._file.count_env_steps = lambda: data.counters.env_steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the protocol, and define the x-axis of W&B."""
        data = data_of(trainer)
        if self._file is not None and self._file.size and not data.counters.env_steps:
            rank_zero_warn(f"{data.folder} contains the metrics of another run: replacing them")
            self._file.truncate(0)
        protocol = {f"protocol/{key}": value for key, value in data.spec.protocol.items()}
        installed = installed_versions(PACKAGES) | {"python": platform.python_version()}
        versions = {f"version/{name}": version for name, version in installed.items()}
        algorithm = {"algorithm": data.algorithm.hyper_parameters[OWN_CLASS]}
        for logger in trainer.loggers:
            logger.log_hyperparams(algorithm | protocol | versions)
            if isinstance(logger, WandbLogger):
                run = logger.experiment
                prefix = logger._prefix and f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}"
                x_axis = f"{prefix}env_steps"
                run.define_metric(x_axis)
                run.define_metric("*", step_metric=x_axis)
                has_midway = data.collector is not None and data.collector.envs.midway_starts
                success = "rollout/success_from_reset" if has_midway else "rollout/success"
                for name in (success, "rollout/return", *metric_names(data.benchmark)):
                    if is_better_when_larger(name):
                        run.define_metric(f"{prefix}{name}", step_metric=x_axis, summary="max,last")
        data.stopwatch.drain()
        self._start_interval(data)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a row if it is due, and at the end."""
        data = data_of(trainer)
        if data.is_step_finished:
            is_due = self._every(data.counters.env_steps)
            if is_due or data.is_over or trainer.should_stop:
                self._log(trainer, data, is_due)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the last row if training ended early."""
        data = data_of(trainer)
        if self._logged_at != data.counters.env_steps:
            self._log(trainer, data, is_due=False)

    def _log(self, trainer: Trainer, data: TaskData, is_due: bool) -> None:
        algorithm, counters, collector = data.algorithm, data.counters, data.collector
        so_far = algorithm.mean_metrics.state_dict()
        metrics = algorithm.drain_metrics()  # first: it counts steps skipped on the GPU
        metrics |= {
            "fault/worker_restarts": counters.worker_restarts,
            "fault/dropped_transitions": counters.dropped_transitions,
            "fault/skipped_updates": counters.skipped_updates,
        }
        if collector is not None:
            windows = joined_windows(collector)
            metrics |= episode_metrics(data.spec, collector, windows, counters)
        metrics |= self._time(data)
        log_row(trainer, counters.env_steps, metrics)
        self._logged_at = counters.env_steps
        if not is_due:
            # if the run is extended, it averages over the full interval, as if it had not ended
            algorithm.mean_metrics.load_state_dict(so_far)

    def _time(self, data: TaskData) -> dict[str, float]:
        elapsed = max(time.perf_counter() - self._measured_at, 1e-9)
        env_steps = data.counters.env_steps - self._measured_env_steps
        updates = data.counters.updates - self._measured_updates
        self._start_interval(data)
        seconds = data.stopwatch.drain()
        times = {
            "time/env_steps_per_second": env_steps / elapsed,
            "time/updates_per_second": updates / elapsed,
        }
        times |= {f"time/{name}_fraction": seconds.get(name, 0.0) / elapsed for name in ACTIVITIES}
        if data.collector is not None:
            return times
        return {name: value for name, value in times.items() if name not in OF_ENVS}

    def _start_interval(self, data: TaskData) -> None:
        self._measured_at = time.perf_counter()
        self._measured_env_steps = data.counters.env_steps
        self._measured_updates = data.counters.updates

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule, the step of the last row, and the size of ``metrics.jsonl``."""
        return {
            "every": self._every.state_dict(),
            "logged_at": self._logged_at,
            "size": 0 if self._file is None else self._file.size,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule, and drop rows logged after the checkpoint."""
        self._every.load_state_dict(state_dict["every"])
        self._logged_at = state_dict["logged_at"]
        if self._file is not None:
            self._file.truncate(state_dict["size"])

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Flush the loggers, because a resumed run does not log these rows again."""
        with distributed.raise_on_all_ranks(OSError):
            if trainer.is_global_zero:
                for logger in trainer.loggers:
                    logger.save()
