"""report.html: rewritten in the run's folder while it trains."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from mtrl_lightning.callbacks.common import SessionCallback, WarnOnce
from mtrl_lightning.reports.budget import TimeBudget
from mtrl_lightning.reports.run_report import write_report

EXPECTED_SECONDS = 1.0
"""Of writing the first page: some twenty charts."""
REFRESH_SECONDS = 60
"""After which a browser loads the page of a run in training again."""


class ReportCallback(SessionCallback):
    """Rewrite ``report.html`` in the run's folder after evaluations, and when the run ends.

    An evaluation is passed over where the page would take more than 1 % of the run's time, so there
    is none in the first 100 seconds; the last page is written in any case, also when the run is
    interrupted or fails. A page that cannot be written does not end the run: there is one warning.
    """

    key = "report"

    def __init__(self) -> None:
        self._budget = TimeBudget(EXPECTED_SECONDS)
        self._warn_once = WarnOnce("report.html could not be written")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register with the session."""
        super().setup(trainer, pl_module, stage)
        self.session.after_evaluation.append(self.write_if_affordable)
        self.session.after_failure.append(self._write)
        self._budget = TimeBudget(EXPECTED_SECONDS)

    def write_if_affordable(self) -> None:
        """Write the page, unless that would take too much of the run's time."""
        if self._budget.allows():
            self._write(refresh_seconds=REFRESH_SECONDS)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the page of the whole run."""
        self._write()

    @rank_zero_only
    def _write(self, refresh_seconds: int = 0) -> None:
        folder = self.session.folder
        if not (folder / "metrics.csv").exists():
            return
        with self._budget.measure(), self._warn_once:
            write_report(folder, refresh_seconds)
