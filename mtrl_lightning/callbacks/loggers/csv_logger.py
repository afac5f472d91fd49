"""metrics.csv: the exact record of a run, also when the run is killed or continued."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor

NO_ROWS = {"rows": 0, "env_steps": -1, "crc32": 0}
"""The fingerprint of an empty file."""


class MetricsCSV(CSVLogger):
    """Write ``metrics.csv`` and ``hparams.yaml`` into the run's folder.

    A row is in the file when ``log_metrics`` returns. If the disk is full, the row is kept in
    memory and written together with a later row. A row without ``env_steps``, such as those of
    Lightning's ``LearningRateMonitor``, gets those that the run has made.

    Args:
        save_dir: The run's folder.
    """

    def __init__(self, save_dir: str) -> None:
        super().__init__(save_dir, name="", version="", flush_logs_every_n_steps=1)
        self.count_env_steps: Callable[[], int] | None = None
        """Returns the environment steps that the run has made; None outside of a run."""

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Return the writer."""
        if self._experiment is None:
            os.makedirs(self.log_dir, exist_ok=True)
            self._experiment = _Writer(log_dir=self.log_dir)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Tensor | float], step: int | None = None) -> None:
        """Write a row.

        Args:
            metrics: the values by name.
            step: the environment steps of the row; where ``metrics`` has no ``env_steps``, those of
                the run are taken in its place.
        """
        row, step = with_env_steps(metrics, step, self.count_env_steps)
        super().log_metrics(row, step)

    def rows(self) -> list[dict[str, float]]:
        """Return the rows in the file, without their empty cells."""
        return self.experiment.rows()

    @rank_zero_only
    def fingerprint(self) -> dict[str, int]:
        """Return the fingerprint of the written rows, which a checkpoint saves for ``resume_from``.

        The file is not read: rows are added to the checksum when they are logged.

        Returns:
            ``rows``: the number of rows; ``env_steps``: those of the last row, -1 without one;
            ``crc32``: the checksum of the rows' names and values.
        """
        return self.experiment.fingerprint()

    @rank_zero_only
    def resume_from(self, env_steps: int, fingerprint: Mapping[str, int] | None = None) -> None:
        """Drop the rows later than a checkpoint, and damaged lines.

        Warn if lines are damaged, or if the rest differs from the rows at the checkpoint.
        Training does not depend on the file: the run continues with the rows that are left.

        Args:
            env_steps: The environment steps of the checkpoint; 0 for a new run.
            fingerprint: Of the file when the checkpoint was written; None if that is not known.
        """
        self.experiment.resume_from(env_steps, fingerprint)


def with_env_steps(
    metrics: Mapping[str, Any], step: int | None, count_env_steps: Callable[[], int] | None
) -> tuple[dict[str, Any], int | None]:
    """Return a row with ``env_steps``, and its step.

    Lightning's own callbacks know no environment steps, and give its count of batches as the step.

    Args:
        metrics: the row.
        step: of the row, as it was given.
        count_env_steps: returns the environment steps that the run has made; None if not known.
    """
    if "env_steps" in metrics or count_env_steps is None:
        return dict(metrics), step
    env_steps = count_env_steps()
    return {"env_steps": env_steps, **metrics}, env_steps


class _Writer(ExperimentWriter):
    """Append to an existing file, and leave it whole if a write fails; Lightning's does neither."""

    def __init__(self, log_dir: str) -> None:
        self._size_before_failed_write: int | None = None
        self._warned_of_failed_write = False
        super().__init__(log_dir)

    @property
    def _path(self) -> Path:
        return Path(self.metrics_file_path)

    def _check_log_dir_exists(self) -> None:
        self.metrics_keys, rows, _ = self._read()
        self._written = _fingerprint(rows)

    def save(self) -> None:
        """Write the waiting rows; if the disk is full, they wait for the next call."""
        if not self.metrics:
            return
        keys = sorted({*self.metrics_keys, *(key for row in self.metrics for key in row)})
        try:
            if keys == self.metrics_keys and self._path.exists():
                self._append(_lines(keys, self.metrics))
            else:
                self._replace(keys, [*self._read()[1], *self.metrics])
        except OSError as error:
            if not self._warned_of_failed_write:
                rank_zero_warn(
                    f"{self._path} cannot be written ({error}): training continues,"
                    " and its rows are kept in memory until there is room again;"
                    " they are lost if the run ends before"
                )
            self._warned_of_failed_write = True
        else:
            self.metrics_keys = keys
            self._written = self.fingerprint()
            self.metrics = []
            self._warned_of_failed_write = False

    def _append(self, lines: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            if self._size_before_failed_write is not None:
                file.truncate(self._size_before_failed_write)
            size = file.seek(0, os.SEEK_END)
            self._size_before_failed_write = size
            try:
                if file.write(lines) < len(lines):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with contextlib.suppress(OSError):  # if this fails, the next call truncates
                    file.truncate(size)
                raise
        self._size_before_failed_write = None

    def _replace(self, keys: list[str], rows: Iterable[Mapping[str, Any]]) -> None:
        unfinished = self._path.with_suffix(".unfinished")
        header = dict(zip(keys, keys, strict=True))
        try:
            unfinished.write_bytes(_lines(keys, [header]) + _lines(keys, rows))
            os.replace(unfinished, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        self._size_before_failed_write = None

    def _read(self) -> tuple[list[str], list[dict[str, str]], int]:
        """Return the header, the rows, and the number of damaged lines."""
        if not self._path.exists():
            return [], [], 0
        content = self._path.read_bytes()[: self._size_before_failed_write]
        # a line without its end was being written when the run was killed
        *lines, unfinished_line = content.decode(errors="replace").split("\n")
        header = _header(lines[0]) if lines else []
        rows = [row for line in lines[1:] if (row := _parse(header, line)) is not None]
        num_lines = max(len(lines) - bool(header), 0) + bool(unfinished_line)
        return header, rows, num_lines - len(rows)

    def rows(self) -> list[dict[str, float]]:
        return [
            {name: float(value) for name, value in row.items() if value and name != "step"}
            for row in self._read()[1]
        ]

    def fingerprint(self) -> dict[str, int]:
        """Return the fingerprint of the rows in the file and of those that wait for the disk."""
        keys = sorted({key for row in self.metrics for key in row})
        lines = _lines(keys, self.metrics).decode().splitlines()
        # parsed, because only the text of the values is in the file
        rows = [row for line in lines if (row := _parse(keys, line)) is not None]
        return _fingerprint(rows, self._written)

    def resume_from(self, env_steps: int, fingerprint: Mapping[str, int] | None) -> None:
        missing = not self._path.exists()
        header, rows, num_damaged = self._read()
        if num_damaged and not header:
            aside = self._path.with_suffix(".damaged.csv")
            os.replace(self._path, aside)
            rank_zero_warn(
                f"the first line of {self._path} is damaged: the file is set aside as {aside.name}"
            )
        elif num_damaged:
            rank_zero_warn(
                f"{self._path}: dropped {num_damaged} damaged line(s), as a killed run leaves them"
            )
        kept = [row for row in rows if int(row["env_steps"]) <= env_steps]
        num_later = len(rows) - len(kept)
        if num_later:
            rank_zero_info(
                f"{self._path}: the {num_later} rows later than the checkpoint, which was saved"
                f" after {env_steps:,} steps, are deleted"
            )
        if fingerprint is not None:
            if _fingerprint(kept[: fingerprint["rows"]]) == fingerprint:
                # further rows of the checkpoint's env step were logged after it was written
                kept = kept[: fingerprint["rows"]]
            else:
                self._warn_of_difference(kept, fingerprint, missing)
        if header:
            self._replace(header, kept)
        self._written = _fingerprint(kept)

    def _warn_of_difference(
        self, rows: Sequence[Mapping[str, str]], expected: Mapping[str, int], missing: bool
    ) -> None:
        at_checkpoint = f"{expected['rows']} rows up to step {expected['env_steps']}"
        current = _fingerprint(rows)
        if missing:
            text = f"is missing: it had {at_checkpoint} at the checkpoint. It restarts empty"
        elif current["rows"] < expected["rows"]:
            text = (
                f"has lost rows: it had {at_checkpoint} at the checkpoint, and has"
                f" {current['rows']} of them up to step {current['env_steps']}. It continues with"
                " these"
            )
        else:
            text = (
                f"was changed: its {current['rows']} rows up to step {current['env_steps']}"
                f" are not the {at_checkpoint} of the checkpoint. It continues with these"
            )
        rank_zero_warn(
            f"{self._path} {text}. Training is not affected; if you have a copy of the file,"
            " stop the run, restore the copy, and resume from the checkpoint"
        )


def _fingerprint(
    rows: Sequence[Mapping[str, str]], before: Mapping[str, int] = NO_ROWS
) -> dict[str, int]:
    """Return the fingerprint of rows that follow those of another fingerprint."""
    crc32 = before["crc32"]
    for row in rows:
        # without empty cells, so that a column that is added later changes nothing
        cells = sorted((name, value) for name, value in row.items() if value)
        crc32 = zlib.crc32(repr(cells).encode(), crc32)
    last = int(rows[-1]["env_steps"]) if rows else before["env_steps"]
    return {"rows": before["rows"] + len(rows), "env_steps": last, "crc32": crc32}


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
    is_unique = len(set(header)) == len(header)
    return header if "env_steps" in header and is_unique else []


def _parse(header: list[str], line: str) -> dict[str, str] | None:
    """Return the row of a line; None if the line is damaged."""
    try:
        row = dict(zip(header, next(csv.reader([line])), strict=True))
        if int(row["env_steps"]) < 0:
            return None
        for cell in row.values():
            if cell:
                float(cell)
    except (StopIteration, ValueError, KeyError, csv.Error):
        return None
    return row
