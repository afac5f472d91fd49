"""metrics.jsonl: the exact record of a run, even if the run is killed or resumed."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from mtrl_lightning.compare.record import METRICS


class MetricsFile(Logger):
    """Append each row of metrics to ``metrics.jsonl``; write hyperparameters to ``hparams.yaml``.

    A row has been written when ``log_metrics`` returns. If the disk is full, the row is kept in
    memory and written together with a later row. Rows without ``env_steps``, such as those of
    Lightning's ``LearningRateMonitor``, get them from ``count_env_steps``.

    Args:
        save_dir: the run folder.
    """

    name = version = ""
    """Empty, so that Lightning's checkpoints are in ``save_dir/checkpoints``."""

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__()
        self._path = Path(save_dir) / METRICS
        self._written = self._path.stat().st_size if self._path.exists() else 0
        self._waiting = b""
        self._hparams: dict[str, Any] = {}
        self.count_env_steps: Callable[[], int] = lambda: 0
        """Returns the environment steps of the run."""

    @property
    def save_dir(self) -> str:
        """The run folder."""
        return str(self._path.parent)

    @property
    def size(self) -> int:
        """Bytes of all rows, including those not yet written; saved in checkpoints."""
        return self._written + len(self._waiting)

    def truncate(self, size: int) -> None:
        """Drop the rows after the first ``size`` bytes when the next row is written."""
        content = self._path.read_bytes()[:size] if self._path.exists() else b""
        self._waiting = b""
        self._written = content.rfind(b"\n") + 1  # a damaged file may end in the middle of a row
        if self._written < size:
            rank_zero_warn(
                f"{self._path} has {self._written} of the {size} bytes that it had at the"
                " checkpoint: the run continues with these rows"
            )

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row.

        Args:
            metrics: the values by name.
            step: Lightning's step, replaced by ``env_steps`` in the row.
        """
        row = {"env_steps": self.count_env_steps(), **metrics}
        values = {name: v if isinstance(v, int) else float(v) for name, v in row.items()}
        is_waiting = bool(self._waiting)
        self._waiting += json.dumps(values).encode() + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                if file.tell() > self._written:  # later rows, or part of a row on a full disk
                    file.truncate(self._written)
                file.write(self._waiting)
        except OSError as error:
            if not is_waiting:
                rank_zero_warn(
                    f"{self._path} cannot be written ({error}): training continues, and rows are"
                    " kept in memory until they can be written"
                )
        else:
            self._written, self._waiting = self.size, b""

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Add hyperparameters to ``hparams.yaml``."""
        self._hparams |= vars(params) if isinstance(params, Namespace) else params
        self._path.parent.mkdir(parents=True, exist_ok=True)
        save_hparams_to_yaml(str(self._path.with_name("hparams.yaml")), self._hparams)


def log_row(trainer: Trainer, env_steps: int, metrics: Mapping[str, Any]) -> None:
    """Log a row of metrics to every logger, with ``env_steps`` as a column and as the step."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics({"env_steps": env_steps, **metrics}, step=env_steps)
