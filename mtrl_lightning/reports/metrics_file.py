"""metrics.csv of a run, as curves."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

METRICS = "metrics.csv"
MAX_ENV_STEPS = 2**53
"""Environment steps up to which double precision has every whole number."""
Curve = tuple[list[int], list[float]]
"""Environment steps and values."""


def read_metrics(run_folder: str | Path) -> dict[str, Curve]:
    """Return every metric of a run as ``{name: (env_steps, values)}``, without empty cells.

    Rows without ``env_steps`` are left out, and so is a last line without its end, which a run may
    be writing.

    Args:
        run_folder: the folder with ``metrics.csv``.
    """
    return MetricsReader(Path(run_folder) / METRICS).read()


class MetricsReader:
    """Read a file of metrics again and again while a run writes it: only the lines that are new.

    Args:
        path: of the file, such as ``metrics.csv``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start_again()

    def _start_again(self) -> None:
        self._file: tuple[int, int] | None = None
        """Device and inode: a file that is rewritten, with other columns, is another one."""
        self._header = b""
        self._end = 0
        """Bytes that were read."""
        self._curves: dict[str, Curve] = {}

    def read(self) -> dict[str, Curve]:
        """Return every metric; see ``read_metrics``. The result grows with the next call.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if a new line is damaged; nothing of what is new is kept.
        """
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            known = (status.st_dev, status.st_ino)
            header = file.readline()
            if (known, header) != (self._file, self._header) or status.st_size < self._end:
                self._start_again()
            start = self._end or len(header)
            if not header.endswith(b"\n") or status.st_size == self._end:
                return self._curves
            file.seek(start)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        points = _points(header, whole)
        for name, env_steps, value in points:
            steps, values = self._curves.setdefault(name, ([], []))
            steps.append(env_steps)
            values.append(value)
        self._file = known
        self._header = header
        self._end = start + len(whole)
        return self._curves


def _points(header: bytes, lines: bytes) -> list[tuple[str, int, float]]:
    """Return name, environment steps and value of every cell that is not empty."""
    points = []
    rows = csv.reader(io.StringIO(lines.decode(errors="replace"), newline=""))
    try:
        names = next(csv.reader([header.decode(errors="replace")]), [])
        if "env_steps" not in names:
            return []
        for row in rows:
            cells = dict(zip(names, row, strict=True))
            if not cells["env_steps"]:
                continue  # of a callback that knew no environment steps, in earlier versions
            env_steps = int(cells.pop("env_steps"))
            if not 0 <= env_steps <= MAX_ENV_STEPS:
                raise ValueError(f"env_steps is {env_steps}")
            cells.pop("step", None)
            points += [(name, env_steps, float(value)) for name, value in cells.items() if value]
    except csv.Error as error:
        raise ValueError(str(error)) from error
    return points


def seconds_of_rows(metrics: dict[str, Curve]) -> npt.NDArray[np.float64] | None:
    """Return the seconds of training that each row stands for; None if no rate was logged.

    They are computed from the rows' env steps per second, so the time between an interruption and
    the continuation does not count. Nor does a row with a rate of 0, that of a run which was
    interrupted after its last env step, in the updates of an iteration.
    """
    if "time/env_steps_per_second" not in metrics:
        return None
    logged, rates = metrics["time/env_steps_per_second"]
    made = np.diff(logged, prepend=0)
    return np.array([n / rate if rate else 0.0 for n, rate in zip(made, rates, strict=True)])


def minutes_until(
    env_steps_N: npt.ArrayLike, metrics: dict[str, Curve]
) -> npt.NDArray[np.float64] | None:
    """Return the minutes of training until each number of env steps; see ``seconds_of_rows``.

    Returns:
        The minutes, evaluations and checkpoints included; None if no rate was logged.
    """
    seconds = seconds_of_rows(metrics)
    if seconds is None:
        return None
    logged = metrics["time/env_steps_per_second"][0]
    return np.interp(np.asarray(env_steps_N), [0, *logged], [0, *np.cumsum(seconds)]) / 60
