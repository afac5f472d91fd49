"""Learning curves as ``curves.png`` in the run folder."""

from __future__ import annotations

from typing import ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer

from mtrl_lightning.callbacks.images import WarnOnce, is_evaluation_of_run, log_image
from mtrl_lightning.callbacks.rollout import data_of
from mtrl_lightning.compare.charts import plot_curves


class CurvesCallback(Callback):
    """Plot ``curves.png`` after each evaluation, and log it to W&B and TensorBoard."""

    order: ClassVar[int] = 4

    def __init__(self) -> None:
        self._warn_once = WarnOnce()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plot the curves."""
        if not is_evaluation_of_run(trainer) or not trainer.is_global_zero:
            return
        data = data_of(trainer)
        failure = "curves.png could not be plotted"
        with self._warn_once(failure, "it is plotted again after the next evaluation"):
            path = plot_curves(data.folder)
            for logger in trainer.loggers:
                log_image(logger, "curves", path, data.counters.env_steps)
