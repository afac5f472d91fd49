"""curves.png in the run's folder."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from mtrl_lightning.callbacks.common import SessionCallback, WarnOnce
from mtrl_lightning.callbacks.images import log_image
from mtrl_lightning.reports.curves import plot_curves


class CurvesCallback(SessionCallback):
    """Draw ``curves.png`` after each evaluation; W&B and TensorBoard get it as ``curves``."""

    key = "curves"

    def __init__(self) -> None:
        self._warn_once = WarnOnce()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register with the session."""
        super().setup(trainer, pl_module, stage)
        self.session.after_evaluation.append(self._draw)

    @rank_zero_only
    def _draw(self) -> None:
        failure = "curves.png could not be drawn"
        with self._warn_once(failure, continuation="it is drawn again after the next evaluation"):
            path = plot_curves(self.session.folder)
            for logger in self.session.loggers:
                log_image(logger, "curves", path, self.session.counters.env_steps)
