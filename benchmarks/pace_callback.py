"""A run of the command line in windows: see ``pacing.py``."""

from __future__ import annotations

import sys
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.examining import Examiner
from benchmarks.pacing import Pacer
from mtrl_lightning.algorithms import Algorithm


class PaceCallback(Callback):
    """Let a training run make its updates in windows; one update is one step.

    Of several processes the first alone waits and writes; the others wait for it to exchange.

    Args:
        steps: updates of a window.
        settle: updates before the first window.
        descriptor: of the open file that the windows' seconds are written to.
        num_episodes: test episodes per task after each window; 0 for none.
    """

    def __init__(self, steps: int, settle: int, descriptor: int, num_episodes: int = 0) -> None:
        self._given = (steps, settle, descriptor)
        self._num_episodes = num_episodes
        self._pacer: Pacer | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Wait where a window is over."""
        assert isinstance(pl_module, Algorithm)
        if not trainer.is_global_zero:
            return
        if self._pacer is None:
            more: dict[str, Any] = {}
            data = trainer.datamodule  # type: ignore[attr-defined]
            # a benchmark may give the trainer a loader alone
            if data is not None and self._num_episodes:
                examiner = Examiner(data.session.benchmark, self._num_episodes)
                more["examine"] = lambda: examiner.examine(
                    pl_module, pl_module.counters.env_steps, pl_module.counters.updates
                )
            counters = pl_module.counters
            about = {"environments": counters.env_steps / max(1, counters.vector_steps)}
            self._pacer = Pacer(
                *self._given,
                pl_module.stopwatch.drain,
                about,
                **more,
            )
        if not self._pacer.tick():
            sys.exit(0)
