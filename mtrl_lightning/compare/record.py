"""The records in a run folder: options, protocol and curves. PyTorch is not imported.

Files are read as plain values, without executing code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import read_config

METRICS = "metrics.jsonl"
ENV_STEPS_RATE = "time/env_steps_per_second"
OFFLINE_RATE = "time/updates_per_second"
"""The rate of an offline run, whose steps are updates."""
QUANTITIES = ("success", "score", "return", "length")
"""Order in which metrics are shown, before all others."""
BOUNDED = ("success", "success_last", "score")
"""Quantities between 0 and 1."""
ENV_STEPS = "env steps"
UPDATES = "updates"

Curve = tuple[list[int], list[float]]
"""Environment steps and values."""


def read_metrics(run_folder: str | Path) -> dict[str, Curve]:
    """Return every metric of a run as ``{name: (env_steps, values)}``.

    An incomplete last line, which a run may be writing, is ignored.

    Args:
        run_folder: folder with ``metrics.jsonl``.
    """
    path = Path(run_folder) / METRICS
    curves: dict[str, Curve] = {}
    *rows, _ = path.read_text(encoding="utf-8").split("\n")
    for number, row in enumerate(rows, start=1):
        try:
            values = json.loads(row)
            env_steps = values.pop("env_steps")
        except (AttributeError, KeyError, ValueError) as error:
            raise ConfigurationError(f"{path}, line {number} is damaged: {error}") from error
        for name, value in values.items():
            steps, numbers = curves.setdefault(name, ([], []))
            steps.append(env_steps)
            numbers.append(float(value))
    return curves


class RunRecord(NamedTuple):
    """The records of one run."""

    folder: Path
    options: dict[str, Any]
    """Sections and their options, as in ``config.yaml``; only ``model`` for a run from Python."""
    protocol: dict[str, Any]
    """Evaluation protocol, such as the horizon; empty if not recorded."""
    curves: dict[str, Curve]
    """Every metric as ``(env_steps, values)``."""

    @property
    def name(self) -> str:
        """The run's name; without recorded options, the name of the parent folder."""
        return str(self.options.get("name") or self.folder.resolve().parent.name)

    @property
    def seed(self) -> int | None:
        """The seed; None if it is not recorded."""
        arguments = self.section("model").get("init_args") or {}
        return self.options.get("seed_everything", arguments.get("seed"))

    @property
    def env_steps(self) -> int:
        """Environment steps of the last row of metrics."""
        return max((steps[-1] for steps, _ in self.curves.values()), default=0)

    @property
    def step_unit(self) -> str:
        """The unit of its steps: environment steps, or updates for an offline run."""
        is_offline = OFFLINE_RATE in self.curves and ENV_STEPS_RATE not in self.curves
        return UPDATES if is_offline else ENV_STEPS

    def section(self, name: str) -> Mapping[str, Any]:
        """Return the options of a section; empty if not recorded."""
        return self.options.get(name) or {}

    def tasks_of(self, metric: str) -> tuple[str, ...]:
        """Return the tasks for which a metric was recorded, sorted."""
        prefix = f"{metric}/"
        return tuple(sorted(n.removeprefix(prefix) for n in self.curves if n.startswith(prefix)))

    def evaluated(self) -> list[str]:
        """Return the evaluation metrics of all splits with values per task, sorted by quantity."""
        names = [
            name
            for name in self.curves
            if (name.startswith("eval/") or name.startswith("eval_"))
            and name.count("/") == 1
            and self.tasks_of(name)
        ]

        def order(name: str) -> tuple[int, str]:
            quantity = name.partition("/")[2]
            is_known = quantity in QUANTITIES
            return QUANTITIES.index(quantity) if is_known else len(QUANTITIES), name

        return sorted(names, key=order)

    def minutes_until(self, env_steps_N: npt.ArrayLike) -> npt.NDArray[np.float64] | None:
        """Return the training minutes until each number of environment steps.

        They include evaluations and checkpoints, and are computed from the logged rates, so that
        the time between an interruption and resuming does not count. Rows with rate 0, logged by
        runs that were interrupted during the updates of an iteration, do not count either.

        Returns:
            The minutes; None if no rate was logged.
        """
        curve = self.curves.get(ENV_STEPS_RATE) or self.curves.get(OFFLINE_RATE)
        if curve is None:
            return None
        logged, rates = curve
        made = np.diff(logged, prepend=0)
        seconds = [n / rate if rate else 0.0 for n, rate in zip(made, rates, strict=True)]
        return np.interp(np.asarray(env_steps_N), [0, *logged], [0, *np.cumsum(seconds)]) / 60


def is_bounded(metric: str) -> bool:
    """Return whether a metric lies between 0 and 1."""
    return any(part in BOUNDED for part in metric.split("/"))


def read_run(folder: Path) -> RunRecord:
    """Read a run folder; only ``metrics.jsonl`` is required."""
    hparams, options = (
        read_config(folder / name) if (folder / name).is_file() else {}
        for name in ("hparams.yaml", "config.yaml")
    )
    if not options:  # a run from Python, for which Lightning logs the algorithm's arguments
        arguments = {name: value for name, value in hparams.items() if "/" not in name}
        options = {"model": {"init_args": arguments}} if arguments else {}
    prefix = "protocol/"
    protocol = {n.removeprefix(prefix): v for n, v in hparams.items() if n.startswith(prefix)}
    return RunRecord(folder, options, protocol, read_metrics(folder))


def find_runs(path: Path) -> list[Path]:
    """Return the path itself if it is a run folder, otherwise the run folders in it.

    Runs are found in ``PATH/version_N`` and ``PATH/NAME/version_N``, oldest first.
    """
    if (path / METRICS).is_file():
        return [path]
    folders = [
        folder
        for pattern in ("version_*", "*/version_*")
        for folder in sorted(path.glob(pattern), key=lambda p: (p.parent, len(p.name), p.name))
        if (folder / METRICS).is_file()
    ]
    if not folders:
        raise ConfigurationError(
            f"{path} is neither a run folder (no {METRICS}) nor contains any: give a run folder,"
            " such as runs/NAME/version_0, or a folder of runs, such as runs/NAME"
        )
    return folders
