"""metrics.jsonl of a run, as curves."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

METRICS = "metrics.jsonl"
ENV_STEPS_RATE = "time/env_steps_per_second"
OFFLINE_RATE = "time/updates_per_second"
"""The rate of a run that steps no environments, whose steps are updates."""
Curve = tuple[list[int], list[float]]
"""Environment steps and values."""


def read_metrics(run_folder: str | Path) -> dict[str, Curve]:
    """Return every metric of a run as ``{name: (env_steps, values)}``.

    A last line without its end, which a run may be writing, is left out.

    Args:
        run_folder: the folder with ``metrics.jsonl``, or a copy of that file.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is damaged.
    """
    path = Path(run_folder)
    path = path / METRICS if path.is_dir() else path
    curves: dict[str, Curve] = {}
    *rows, _ = path.read_text(errors="replace").split("\n")
    for row in rows:
        values = json.loads(row)
        if not isinstance(values, dict) or "env_steps" not in values:
            raise ValueError(f"a row without env_steps: {row[:80]}")
        env_steps = int(values.pop("env_steps"))
        for name, value in values.items():
            steps, numbers = curves.setdefault(name, ([], []))
            steps.append(env_steps)
            numbers.append(float(value))
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
    rate_name = next((name for name in (ENV_STEPS_RATE, OFFLINE_RATE) if name in metrics), None)
    if rate_name is None:
        return None
    logged, rates = metrics[rate_name]
    made = np.diff(logged, prepend=0)
    seconds = [n / rate if rate else 0.0 for n, rate in zip(made, rates, strict=True)]
    return np.interp(np.asarray(env_steps_N), [0, *logged], [0, *np.cumsum(seconds)]) / 60
