"""metrics.csv, which a continued run goes on with."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only


class _Writer(ExperimentWriter):
    """Append to a file that is there already, where Lightning's deletes it."""

    def _check_log_dir_exists(self) -> None:
        path = Path(self.metrics_file_path)
        if path.exists():
            with path.open(newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def rewind(self, env_steps: int) -> None:
        path = Path(self.metrics_file_path)
        if not path.exists():
            return
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["env_steps"]) <= env_steps]
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(unfinished, path)


class MetricsCSV(CSVLogger):
    """Write ``metrics.csv`` and ``hparams.yaml`` into the run's folder.

    Args:
        save_dir: the run's folder.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__(save_dir, name="", version="", flush_logs_every_n_steps=1)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Return the writer."""
        if self._experiment is None:
            os.makedirs(self.log_dir, exist_ok=True)
            self._experiment = _Writer(log_dir=self.log_dir)
        return self._experiment

    @rank_zero_only
    def rewind(self, env_steps: int) -> None:
        """Drop the rows later than ``env_steps``."""
        self.experiment.rewind(env_steps)
