"""A progress bar over environment steps, or over the updates of an offline algorithm."""

from __future__ import annotations

import sys
from statistics import fmean
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm import tqdm

from mtrl_lightning.callbacks.rollout import data_of
from mtrl_lightning.rollout.evaluator import main_metric, metric_prefix
from mtrl_lightning.transitions import step_unit

SECONDS_IN_A_FILE = 30.0
"""Seconds between two refreshes of the bar in a file, where each refresh adds a line."""


class EnvStepProgressBar(TQDMProgressBar):
    """Show environment steps, steps/s, remaining time, and the latest success and return.

    For an offline algorithm, show updates instead of environment steps.

    Args:
        interval: seconds between two refreshes in a terminal; in a file, there is at most one line
            every 30 s.
    """

    def __init__(self, interval: float = 0.5) -> None:
        super().__init__()
        self._interval = interval if sys.stderr.isatty() else max(interval, SECONDS_IN_A_FILE)

    def init_train_tqdm(self) -> tqdm:
        """Return the bar, which advances after each vector step."""
        data = data_of(self.trainer)
        bar = tqdm(
            total=data.last_step,
            initial=data.counters.env_steps,
            unit=f" {step_unit(data.kind)}",
            unit_scale=True,
            mininterval=self._interval,
            disable=self.is_disabled,
            dynamic_ncols=True,
        )

        def advance(env_steps: int) -> None:
            bar.total = data.last_step  # grows while a lost replay is refilled
            bar.update(env_steps - bar.n)

        data.after_step.append(advance)
        return bar

    def init_validation_tqdm(self) -> tqdm:
        """Return no bar: the evaluator has one over its episodes."""
        return tqdm(disable=True)

    init_sanity_tqdm = init_test_tqdm = init_validation_tqdm

    def on_train_epoch_start(self, *args: Any) -> None:
        """Do nothing: the bar does not count epochs."""

    def on_train_epoch_end(self, *args: Any) -> None:
        """Do nothing."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the latest results, refreshed every 100 updates."""
        if batch_idx % 100 == 0:
            self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the final results and close the bar."""
        self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module))
        self.train_progress_bar.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close the bar."""
        if self._train_progress_bar is not None:
            self._train_progress_bar.close()

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the latest results of an evaluation and of training episodes.

        The success rate only includes episodes that started with a reset.
        """
        data = data_of(trainer)
        splits = data.benchmark.splits[1:]
        prefix = metric_prefix(splits[0]) if splits else "eval"
        metric = f"{prefix}/{main_metric(data.spec)}"
        values: dict[str, Any] = {
            metric.replace("_", " ").replace("/", " "): trainer.callback_metrics.get(metric)
        }
        if data.collector is not None:
            windows = data.collector.windows
            success = windows.success_from_reset().values() if data.spec.has_success else ()
            values["success"] = fmean(success) if success else None
            returns = [of_task["return"]["mean"] for of_task in windows.summary().values()]
            values["return"] = fmean(returns) if returns else None
        return {name: f"{value:.2f}" for name, value in values.items() if value is not None}
