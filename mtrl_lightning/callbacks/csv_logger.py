"""metrics.csv, which a continued run goes on with."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn


class _Writer(ExperimentWriter):
    """Append to a file that is there already, and leave it whole whatever happens, where Lightning's does neither."""

    def __init__(self, log_dir: str) -> None:
        self._torn: int | None = None
        self._full = False
        super().__init__(log_dir)

    @property
    def _path(self) -> Path:
        return Path(self.metrics_file_path)

    def _check_log_dir_exists(self) -> None:
        self.metrics_keys = self._read()[0]

    def save(self) -> None:
        """Write the rows that wait; if the disk takes none, they wait for the next call."""
        if not self.metrics:
            return
        keys = sorted({*self.metrics_keys, *(key for row in self.metrics for key in row)})
        try:
            if keys == self.metrics_keys and self._path.exists():
                self._append(_lines(keys, self.metrics))
            else:
                self._replace(keys, [*self._read()[1], *self.metrics])
        except OSError as error:
            if not self._full:
                rank_zero_warn(
                    f"{self._path} cannot be written ({error}): training goes on, and its rows are"
                    " kept in memory"
                    " until there is room again; they are lost if the run ends before"
                )
            self._full = True
        else:
            self.metrics_keys, self.metrics, self._full = keys, [], False

    def _append(self, lines: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            if self._torn is not None:
                file.truncate(self._torn)
            self._torn = file.seek(0, os.SEEK_END)
            try:
                if file.write(lines) < len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):  # else the next call does it
                    file.truncate(self._torn)
                raise
        self._torn = None

    def _replace(self, keys: list[str], rows: Iterable[Mapping[str, Any]]) -> None:
        unfinished = self._path.with_suffix(".unfinished")
        try:
            unfinished.write_bytes(
                _lines(keys, [dict(zip(keys, keys, strict=True))]) + _lines(keys, rows)
            )
            os.replace(unfinished, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        self._torn = None

    def _read(self) -> tuple[list[str], list[dict[str, str]], int]:
        """Return the header, the rows, and how many lines are no rows."""
        if not self._path.exists():
            return [], [], 0
        content = self._path.read_bytes()[: self._torn].decode(errors="replace")
        *lines, rest = content.split("\n")  # a line without its end was killed while it was written
        header = _header(lines[0]) if lines else []
        rows = [row for line in lines[1:] if (row := _parse(header, line)) is not None]
        return header, rows, max(len(lines) - bool(header), 0) - len(rows) + bool(rest)

    def rewind(self, env_steps: int) -> None:
        header, rows, damaged = self._read()
        if damaged and not header:
            aside = self._path.with_suffix(".damaged.csv")
            os.replace(self._path, aside)
            rank_zero_warn(
                f"the first line of {self._path} is damaged: the file is set aside as {aside.name}"
            )
        elif damaged:
            rank_zero_warn(
                f"{self._path}: dropped {damaged} damaged line(s), as a killed run leaves them"
            )
        if header:
            self._replace(header, [row for row in rows if int(row["env_steps"]) <= env_steps])

    def rows(self) -> list[dict[str, float]]:
        return [
            {k: float(v) for k, v in row.items() if v and k != "step"} for row in self._read()[1]
        ]


class MetricsCSV(CSVLogger):
    """Write ``metrics.csv`` and ``hparams.yaml`` into the run's folder.

    A row is in the file when ``log_metrics`` returns, unless the disk is full: then it follows with
    a later row.

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
        """Drop the rows later than ``env_steps``, and lines that are no rows, with a warning that says how many."""
        self.experiment.rewind(env_steps)

    def rows(self) -> list[dict[str, float]]:
        """Return the rows in the file, without their empty cells."""
        return self.experiment.rows()


def _lines(keys: list[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, keys).writerows(rows)
    return text.getvalue().encode()


def _header(line: str) -> list[str]:
    """Return the names of the columns; none if the line is damaged."""
    try:
        header = next(csv.reader([line]), [])
    except csv.Error:
        return []
    return header if "env_steps" in header and len({*header}) == len(header) else []


def _parse(header: list[str], line: str) -> dict[str, str] | None:
    try:
        row = dict(zip(header, next(csv.reader([line])), strict=True))
        int(row["env_steps"])
        [float(cell) for cell in row.values() if cell]
    except (StopIteration, ValueError, KeyError, csv.Error):
        return None
    return row
