"""curves.png and report.html: rewritten in the run's folder while it trains."""

from __future__ import annotations

import time

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from mtrl_lightning.callbacks.common import SessionCallback, WarnOnce
from mtrl_lightning.callbacks.images import log_image
from mtrl_lightning.reports.run_report import plot_curves, write_report

MAX_SHARE = 0.01
"""Share of the run's time that both files may take."""
EXPECTED_SECONDS = 1.0
"""Of writing them for the first time: some twenty charts."""
REFRESH_SECONDS = 60
"""After which a browser reloads the page of a run in training."""


class ReportCallback(SessionCallback):
    """Rewrite ``curves.png`` and ``report.html`` after evaluations, and when the run ends.

    An evaluation is passed over where they would take more than 1 % of the run's time, so there
    are none in the first 100 seconds; the last ones are written in any case, also when the run is
    interrupted or fails. W&B and TensorBoard get the image ``curves`` if they are on. A file that
    cannot be written, or that a logger cannot take, does not end the run: there is one warning.
    """

    key = "report"

    def __init__(self) -> None:
        self._warn_once = WarnOnce()
        self._start()

    def _start(self) -> None:
        self._started_at = time.perf_counter()
        self._spent = 0.0
        self._longest = EXPECTED_SECONDS
        self._logged_at = -1
        """Environment steps of the image that loggers have."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register with the session."""
        super().setup(trainer, pl_module, stage)
        self.session.after_evaluation.append(self.write_if_affordable)
        self.session.after_failure.append(self._write)
        self._start()

    def write_if_affordable(self) -> None:
        """Write the files, unless that would take too much of the run's time."""
        elapsed = time.perf_counter() - self._started_at
        if self._spent + self._longest <= MAX_SHARE * elapsed:
            self._write(refresh_seconds=REFRESH_SECONDS)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files of the whole run."""
        self._write()

    @rank_zero_only
    def _write(self, refresh_seconds: int = 0) -> None:
        folder = self.session.folder
        if not (folder / "metrics.csv").exists():
            return
        start = time.perf_counter()
        failure = "report.html and curves.png could not be written"
        with self._warn_once(failure, continuation="they are written again later"):
            path = plot_curves(folder)  # the page has a link to it
            write_report(folder, refresh_seconds)
            env_steps = self.session.counters.env_steps
            for logger in self.session.loggers if env_steps != self._logged_at else ():
                log_image(logger, "curves", path, env_steps)
            self._logged_at = env_steps
        seconds = time.perf_counter() - start
        self._spent += seconds
        self._longest = max(self._longest, seconds)
