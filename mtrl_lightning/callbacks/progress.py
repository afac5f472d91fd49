"""A progress bar over environment steps, or over the updates of an offline algorithm."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from mtrl_lightning.callbacks.rollout_metrics import rollout_metrics
from mtrl_lightning.rollout.evaluator import main_metric, metric_prefix
from mtrl_lightning.run.session import Session

SECONDS_IN_A_FILE = 30.0
"""Between two lines of the bar in a file, where each refresh adds a line."""


class EnvStepProgressBar(ProgressBar):
    """Show environment steps, steps/s, time left, and the latest success and return.

    Of an offline algorithm they are updates.

    Args:
        interval: Seconds between two refreshes of a terminal; a file gets at most a line every
            30 s.
    """

    def __init__(self, interval: float = 0.5) -> None:
        super().__init__()
        self._interval = interval if sys.stderr.isatty() else max(interval, SECONDS_IN_A_FILE)
        self._bar: tqdm | None = None
        self._session: Session | None = None
        self._enabled = True

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def disable(self) -> None:
        """Hide the bar."""
        self._enabled = False

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        return self._enabled

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar."""
        self._session = Session.of(trainer, pl_module)
        self._session.after_vector_step.append(self._advance)
        self._bar = tqdm(
            total=self._session.loop.last_step,
            initial=self._session.counters.env_steps,
            unit=f" {self._session.algorithm.step_unit}",
            unit_scale=True,
            mininterval=self._interval,
            disable=not self._enabled or not trainer.is_global_zero,
            dynamic_ncols=True,
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the latest results, looked up every 100 updates and at the end."""
        if self._bar is None or self._session is None:
            return
        if self._session.counters.updates % 100 == 0 or trainer.should_stop:
            self._bar.set_postfix(_latest(self._session), refresh=trainer.should_stop)

    def _advance(self, env_steps: int) -> None:
        if self._bar is not None and self._session is not None:
            self._bar.total = self._session.loop.last_step  # grows while a lost replay is filled
            self._bar.update(env_steps - self._bar.n)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the final results and close the bar."""
        if self._bar is not None and self._session is not None and self._session.is_open:
            self._bar.set_postfix(_latest(self._session))
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close the bar."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def shows_progress(trainer: Trainer) -> bool:
    """Return whether bars of this package are wanted: not beside those of another library."""
    bar = trainer.progress_bar_callback
    return isinstance(bar, EnvStepProgressBar) and bar.is_enabled and trainer.is_global_zero


def _latest(session: Session) -> dict[str, str]:
    rollout = rollout_metrics(session, session.collector.windows) if session.has_envs else {}
    splits = session.benchmark.splits[1:]
    prefix = metric_prefix(splits[0]) if splits else "eval"
    shown = prefix.replace("_", " ")
    values = {
        f"{shown} success": session.results.get(f"{prefix}/success"),
        "success": rollout.get("rollout/success"),
        "return": rollout.get("rollout/return"),
    }
    if not session.spec.has_success:
        metric = main_metric(session.spec)
        values = {f"{shown} {metric}": session.results.get(f"{prefix}/{metric}")} | values
    return {name: f"{value:.2f}" for name, value in values.items() if value is not None}
