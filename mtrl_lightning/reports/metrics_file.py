"""metrics.csv of a run, as curves."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import numpy.typing as npt

Curve = tuple[list[int], list[float]]
"""Environment steps and values."""


def read_metrics(run_folder: str | Path) -> dict[str, Curve]:
    """Return every metric of a run as ``{name: (env_steps, values)}``, without empty cells.

    A last line without its end, which a run may be writing, is left out.

    Args:
        run_folder: the folder with ``metrics.csv``.
    """
    content = (Path(run_folder) / "metrics.csv").read_bytes().decode(errors="replace")
    whole = content[: content.rfind("\n") + 1]
    rows = csv.reader(io.StringIO(whole, newline=""))
    names = next(rows, [])
    curves: dict[str, Curve] = {}
    if "env_steps" not in names:
        return curves
    place = names.index("env_steps")
    for row in rows:
        env_steps = int(row[place])
        for name, value in zip(names, row, strict=True):
            if value and name not in ("env_steps", "step"):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(env_steps)
                values.append(float(value))
    return curves


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
