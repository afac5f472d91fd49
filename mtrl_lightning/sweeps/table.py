"""The table of a sweep's trials, with intervals over seeds. No PyTorch."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrl_lightning.formats import UNKNOWN, markdown, number, text_table, whole, with_interval
from mtrl_lightning.reports.statistics import interquartile_mean, interval
from mtrl_lightning.runs import replacing
from mtrl_lightning.sweeps.study import ERROR, Outcome, outcomes_of
from mtrl_lightning.sweeps.sweep_file import SweepFile

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

TABLE = "sweep.csv"
MAX_ROWS = 20
"""Trials of the printed table, the best first."""
MAX_WIDTH = 28
"""Characters of a value in a table of text."""
DECIMALS = 3
"""Of results, in which trials may differ by little."""
STATES = ("complete", "pruned", "fail")
"""States of a finished trial, in the order of the table; a pruned one ended early."""
LEFT_OUT = ("model", "init_args")
"""Parts of the names of options that the table leaves out."""

Row = dict[str, Any]
"""A trial: ``trial`` its number, ``state``, ``value`` (the metric's best value of each seed,
averaged; of a pruned trial the last one), ``middle``, ``low``, ``high`` (interquartile mean over
seeds and tasks at each seed's best value with its 95 % bootstrap interval, None with one seed),
``last`` (the metric's last value, averaged), ``seeds``, ``env_steps`` at the best value, the values
of the parameters, and ``error``."""


def rows_of(study: Study, sweep: SweepFile) -> list[Row]:
    """Return the finished trials, the best first, then those that ended early, then failed ones.

    Args:
        study: with the trials.
        sweep: content of the sweep file.
    """
    trials = study.get_trials(deepcopy=False)
    rows = [_row(trial, sweep) for trial in trials if trial.state.is_finished()]
    sign = -1 if sweep.is_maximized else 1
    return sorted(
        rows,
        key=lambda row: (STATES.index(row["state"]), sign * (row["value"] or 0.0), row["trial"]),
    )


def _row(trial: FrozenTrial, sweep: SweepFile) -> Row:
    outcomes = outcomes_of(trial.user_attrs) if trial.state.name == "COMPLETE" else []
    low = high = middle = None
    if outcomes:
        scores_ST = _scores(outcomes)
        middle = interquartile_mean(scores_ST)
        if len(outcomes) > 1:
            low, high = interval(scores_ST, np.random.default_rng(0))
    steps = [one.env_steps for one in outcomes] or list(trial.intermediate_values)[-1:]
    return {
        "trial": trial.number,
        "state": trial.state.name.lower(),
        "value": trial.value,
        "middle": middle,
        "low": low,
        "high": high,
        "last": float(np.mean([one.last for one in outcomes])) if outcomes else None,
        "seeds": len(outcomes),
        "env_steps": round(float(np.mean(steps))) if steps else None,
        **{name: trial.params.get(name) for name in sweep.parameters},
        "error": trial.user_attrs.get(ERROR, ""),
    }


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
    parts = {name: [p for p in name.split(".") if p not in LEFT_OUT] or [name] for name in names}
    short = {}
    for name, own in parts.items():
        for count in range(1, len(own) + 1):
            tail = own[-count:]
            if sum(other[-count:] == tail for other in parts.values()) == 1:
                break
        short[name] = ".".join(tail)
    return short


def _cells(rows: list[Row], sweep: SweepFile) -> list[list[str]]:
    """Return the header and the rows of the table as texts."""
    names = short_names(list(sweep.parameters))
    results = [sweep.metric, "IQM [95 % interval]", "last", "seeds", "env steps"]
    lines = [["trial", "state", *results, *names.values()]]
    lines += [
        [
            str(row["trial"]),
            row["state"],
            number(row["value"], DECIMALS),
            with_interval(row["middle"], (row["low"], row["high"]), DECIMALS),
            number(row["last"], DECIMALS),
            str(row["seeds"] or UNKNOWN),
            whole(row["env_steps"]),
            *(_cell(row[name]) for name in names),
        ]
        for row in rows
    ]
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return UNKNOWN
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_WIDTH else f"...{text[3 - MAX_WIDTH :]}"


def write_tables(rows: list[Row], sweep: SweepFile, folder: Path) -> list[Path]:
    """Write all trials as ``sweep.csv`` and ``sweep.md``, and return their paths.

    Args:
        rows: the trials.
        sweep: content of the sweep file.
        folder: of the sweep.
    """
    path = folder / TABLE
    with replacing(path) as unfinished, unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0] if rows else ["trial"])
        writer.writeheader()
        writer.writerows(rows)
    page = path.with_suffix(".md")
    with replacing(page) as unfinished:
        unfinished.write_text(markdown(_cells(rows, sweep)) + "\n", encoding="utf-8")
    return [path, page]


def printed_table(rows: list[Row], sweep: SweepFile) -> str:
    """Return the best trials as a text table, and why the others failed.

    Args:
        rows: the trials, the best first.
        sweep: content of the sweep file.
    """
    text = [text_table(_cells(rows[:MAX_ROWS], sweep))]
    if len(rows) > MAX_ROWS:
        text.append(f"... and {len(rows) - MAX_ROWS} more in {TABLE}")
    what = "largest" if sweep.is_maximized else "smallest"
    text.append(
        f"{sweep.metric}: the {what} value of a run, averaged over seeds; IQM: interquartile mean"
        " over seeds and tasks there, with the 95 % bootstrap interval over seeds"
    )
    text += [f"trial {row['trial']} {row['error']}" for row in rows if row["error"]]
    return "\n".join(text)
