"""metrics.csv of a run, as curves."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import numpy.typing as npt

METRICS = "metrics.csv"
Curve = tuple[list[int], list[float]]
"""Environment steps and values."""


def read_metrics(run_folder: str | Path) -> dict[str, Curve]:
    """Return every metric of a run as ``{name: (env_steps, values)}``, without empty cells.

    A last line without its end, which a run may be writing, is left out.

    Args:
        run_folder: the folder with ``metrics.csv``, or a copy of that file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is damaged.
    """
    path = Path(run_folder)
    path = path / METRICS if path.is_dir() else path
    text = path.read_bytes().decode(errors="replace")
    complete = text[: text.rfind("\n") + 1]
    curves: dict[str, Curve] = {}
    try:
        rows = csv.reader(io.StringIO(complete, newline=""))
        names = next(rows, [])
        for row in rows:
            cells = dict(zip(names, row, strict=True))
            cells.pop("step", None)
            env_steps = int(cells.pop("env_steps", ""))
            for name, value in cells.items():
                if value:
                    steps, values = curves.setdefault(name, ([], []))
                    steps.append(env_steps)
                    values.append(float(value))
    except csv.Error as error:
        raise ValueError(str(error)) from error
    return curves


def minutes_until(
    env_steps_N: npt.ArrayLike, metrics: dict[str, Curve]
) -> npt.NDArray[np.float64] | None:
    """Return the minutes of training until each number of env steps.

    They are computed from the rows' env steps per second (of an offline run, whose steps are
    updates, updates per second), so the time between an interruption and the continuation does not
    count. Nor does a row with a rate of 0, that of a run which was interrupted after its last env
    step, in the updates of an iteration.

    Returns:
        The minutes, evaluations and checkpoints included; None if no rate was logged.
    """
    names = ("time/env_steps_per_second", "time/updates_per_second")
    rate_name = next((name for name in names if name in metrics), None)
    if rate_name is None:
        return None
    logged, rates = metrics[rate_name]
    made = np.diff(logged, prepend=0)
    seconds = [n / rate if rate else 0.0 for n, rate in zip(made, rates, strict=True)]
    return np.interp(np.asarray(env_steps_N), [0, *logged], [0, *np.cumsum(seconds)]) / 60
