"""A progress bar over environment steps."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.callbacks.common import find
from mtrl_lightning.callbacks.evaluation import EvaluationCallback
from mtrl_lightning.callbacks.rollout import RolloutCallback


class EnvStepProgressBar(ProgressBar):
    """Show environment steps, steps/s, time left, and the latest success and return.

    Args:
        interval: seconds between two refreshes; a file gets a line every 30 s at most.
    """

    def __init__(self, interval: float = 0.5) -> None:
        super().__init__()
        self._interval = interval if sys.stderr.isatty() else max(interval, 30.0)
        self._bar: tqdm | None = None
        self._enabled = True

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def disable(self) -> None:
        """Hide the bar."""
        self._enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar."""
        assert isinstance(pl_module, Algorithm)
        total, done = find(trainer, RolloutCallback).total_steps, pl_module.counters.env_steps
        self._bar = tqdm(
            total=total, initial=done, unit=" env steps", unit_scale=True, mininterval=self._interval,
            disable=not self._enabled or not trainer.is_global_zero, dynamic_ncols=True,
        )  # fmt: skip

    def advance(self, env_steps: int) -> None:
        """Move the bar to a number of environment steps."""
        if self._bar is not None:
            self._bar.update(env_steps - self._bar.n)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar; look up the latest results when an evaluation was made or episodes ended."""
        assert isinstance(pl_module, Algorithm)
        if self._bar is None:
            return
        shown = self._shown(trainer, pl_module)
        if shown:
            self._bar.set_postfix(shown, refresh=False)
        self.advance(pl_module.counters.env_steps)

    def _shown(self, trainer: Trainer, algorithm: Algorithm) -> dict[str, str]:
        assert self._bar is not None
        if algorithm.counters.updates % 100 and not trainer.should_stop:
            return {}
        evaluated = find(trainer, EvaluationCallback).results
        rollout = find(trainer, RolloutCallback).metrics(algorithm.spec.task_names)
        values = {
            "eval success": evaluated.get("eval/success"),
            "success": rollout.get("rollout/success"),
            "return": rollout.get("rollout/return"),
        }
        return {name: f"{value:.2f}" for name, value in values.items() if value is not None}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
