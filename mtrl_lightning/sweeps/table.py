"""What a sweep found: the table of its trials, with intervals over seeds. No PyTorch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mtrl_lightning import formats
from mtrl_lightning.formats import UNKNOWN, number, whole, with_interval
from mtrl_lightning.reports.statistics import interquartile_mean, interval
from mtrl_lightning.runs import replacing
from mtrl_lightning.sweeps.runs import Outcome
from mtrl_lightning.sweeps.study import ERROR, Study, outcomes_of
from mtrl_lightning.sweeps.sweep_file import SweepFile

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

TABLE = "sweep.csv"
MAX_ROWS = 20
"""Trials of the printed table, the best first."""
MAX_WIDTH = 28
"""Characters of a value in the printed table."""
DECIMALS = 3
"""Of results, in which trials may differ by little."""
NO_PART_OF_A_NAME = ("model", "init_args")
"""Parts of the names of options that are left out in the table."""


class Row(NamedTuple):
    """A trial of the table."""

    trial: int
    state: str
    """``complete``, ``pruned`` (ended early) or ``fail``."""
    value: float | None
    """The metric's best value of each seed, averaged; of a pruned trial its last one."""
    middle: float | None
    """Interquartile mean over seeds and tasks, at each seed's best value."""
    low: float | None
    """Lower end of the 95 % bootstrap interval of that; None with one seed."""
    high: float | None
    last: float | None
    """The metric's last value, averaged over seeds."""
    seeds: int
    env_steps: int | None
    """Environment steps at the best value, averaged; those at the end of a pruned trial."""
    parameters: dict[str, Any]
    error: str
    """Why it failed."""


def rows_of(study: Study, sweep: SweepFile) -> list[Row]:
    """Return the finished trials, the best first, then those that ended early, then failed ones.

    Args:
        study: with the trials.
        sweep: what the sweep file says.
    """
    rows = [_row_of(trial) for trial in study.trials if trial.state.is_finished()]
    sign = -1 if sweep.is_maximized else 1
    places = {"complete": 0, "pruned": 1, "fail": 2}
    return sorted(rows, key=lambda row: (places[row.state], sign * (row.value or 0.0), row.trial))


def _row_of(trial: FrozenTrial) -> Row:
    state = trial.state.name.lower()
    outcomes = outcomes_of(trial.user_attrs) if state == "complete" else []
    low: float | None = None
    high: float | None = None
    middle: float | None = None
    if outcomes:
        scores_ST = _scores(outcomes)
        middle = interquartile_mean(scores_ST)
        if len(outcomes) > 1:
            low, high = interval(scores_ST, np.random.default_rng(0))
    steps = [one.env_steps for one in outcomes] or list(trial.intermediate_values)[-1:]
    return Row(
        trial=trial.number,
        state=state,
        value=trial.value,
        middle=middle,
        low=low,
        high=high,
        last=float(np.mean([one.last for one in outcomes])) if outcomes else None,
        seeds=len(outcomes),
        env_steps=round(float(np.mean(steps))) if steps else None,
        parameters=dict(trial.params),
        error=trial.user_attrs.get(ERROR, ""),
    )


def _scores(outcomes: list[Outcome]) -> np.ndarray:
    """Return the scores of seeds and tasks, ``[S, T]``; one task where the metric has none."""
    names = sorted(outcomes[0].per_task)
    if not names or any(sorted(one.per_task) != names for one in outcomes):
        return np.array([[one.best] for one in outcomes])
    return np.array([[one.per_task[name] for name in names] for one in outcomes])


def short_names(names: list[str]) -> dict[str, str]:
    """Return a short name for each option: its last parts, as many as make it unique.

    Args:
        names: full names of options, such as ``model.init_args.tau``.
    """
    parts = {
        name: [part for part in name.split(".") if part not in NO_PART_OF_A_NAME] or [name]
        for name in names
    }
    short = {}
    for name, own in parts.items():
        for count in range(1, len(own) + 1):
            tail = own[-count:]
            if sum(other[-count:] == tail for other in parts.values()) == 1:
                break
        short[name] = ".".join(tail)
    return short


def write_table(rows: list[Row], sweep: SweepFile, folder: Path) -> Path:
    """Write all trials as a CSV file and return its path.

    Args:
        rows: the trials.
        sweep: what the sweep file says.
        folder: of the sweep.
    """
    names = [parameter.name for parameter in sweep.parameters]
    columns = [name for name in Row._fields if name not in ("parameters", "error")]
    path = folder / TABLE
    with replacing(path) as unfinished, unfinished.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, *names, "error"])
        for row in rows:
            cells = [getattr(row, name) for name in columns]
            chosen = [row.parameters.get(name, "") for name in names]
            writer.writerow(["" if cell is None else cell for cell in (*cells, *chosen, row.error)])
    return path


def result_names(sweep: SweepFile) -> list[str]:
    """Return the names of the columns of ``result_cells``."""
    return [sweep.metric, "IQM [95 % interval]", "last", "seeds", "env steps"]


def result_cells(row: Row) -> list[str]:
    """Return what a trial came to as texts."""
    return [
        number(row.value, DECIMALS),
        with_interval(row.middle, (row.low, row.high), DECIMALS),
        number(row.last, DECIMALS),
        str(row.seeds or UNKNOWN),
        whole(row.env_steps),
    ]


def text_table(rows: list[Row], sweep: SweepFile) -> str:
    """Return the best trials as a text table.

    Args:
        rows: the trials, the best first.
        sweep: what the sweep file says.
    """
    names = short_names([parameter.name for parameter in sweep.parameters])
    lines = [["trial", "state", *result_names(sweep), *names.values()]]
    for row in rows[:MAX_ROWS]:
        chosen = [_cell(row.parameters.get(name, UNKNOWN)) for name in names]
        lines.append([str(row.trial), row.state, *result_cells(row), *chosen])
    text = [formats.text_table(lines)]
    if len(rows) > MAX_ROWS:
        text.append(f"... and {len(rows) - MAX_ROWS} more in {TABLE}")
    what = "largest" if sweep.is_maximized else "smallest"
    text.append(
        f"{sweep.metric}: the {what} value of a run, averaged over seeds; IQM: interquartile mean"
        " over seeds and tasks there, with the 95 % bootstrap interval over seeds"
    )
    text += [f"trial {row.trial} {row.error}" for row in rows if row.error]
    return "\n".join(text)


def _cell(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_WIDTH else f"...{text[3 - MAX_WIDTH :]}"
