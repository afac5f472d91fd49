"""report.html of a sweep: its trials, their learning curves, and what matters. No PyTorch."""

from __future__ import annotations

import datetime
import shlex
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrl_lightning.formats import UNKNOWN
from mtrl_lightning.reports.budget import TimeBudget
from mtrl_lightning.reports.metrics_file import Curve, read_metrics
from mtrl_lightning.reports.page import (
    STEPS,
    Cell,
    Link,
    bars,
    chart,
    curve,
    html_table,
    page,
    section,
    text,
    write_page,
)
from mtrl_lightning.reports.record import is_bounded
from mtrl_lightning.reports.run_report import REPORT
from mtrl_lightning.runs import versions
from mtrl_lightning.sweeps.runs import finite, run_name
from mtrl_lightning.sweeps.study import Study
from mtrl_lightning.sweeps.sweep_file import Parameter, SweepFile
from mtrl_lightning.sweeps.table import (
    MIN_TRIALS,
    TABLE,
    Row,
    importances,
    result_cells,
    result_names,
    rows_of,
    short_names,
)

STATES = {
    "complete": "complete",
    "pruned": "ended early",
    "fail": "failed",
    "running": "in training",
}
"""States of a trial, and how the page names them."""
MAX_CURVES = 20
"""Trials with a learning curve, the best first."""
MAX_ROWS = 200
"""Trials of the table, the best first."""
EXPLANATION = (
    "The result of a trial is the best value in the course of a run, averaged over its seeds; that"
    " of a trial that ended early is its last value. IQM: interquartile mean over seeds and tasks"
    " at that point, with its 95 % bootstrap interval over seeds. The best of many noisy results is"
    " too good: train the winner again with other seeds."
)


class SweepReport:
    """Write ``report.html`` into a sweep's folder, again and again while it runs.

    Args:
        sweep: what the sweep file says.
        folder: of the sweep.
    """

    def __init__(self, sweep: SweepFile, folder: Path) -> None:
        self._sweep = sweep
        self._folder = folder
        self._budget = TimeBudget()

    def write_if_affordable(self, study: Study) -> None:
        """Write the page, unless pages would take more than 1 % of the sweep's time.

        One that cannot be written is passed over: it is no reason to lose a sweep.
        """
        if self._budget.allows():
            try:
                self.write(study)
            except Exception as error:
                warnings.warn(f"the sweep's page could not be written: {error!r}", stacklevel=2)

    def write(self, study: Study, rows: list[Row] | None = None) -> Path:
        """Write the page and return its path.

        Args:
            study: with the trials.
            rows: what ``rows_of`` returned; None to compute it.
        """
        with self._budget.measure():
            path = self._folder / REPORT
            rows = rows_of(study, self._sweep) if rows is None else rows
            write_page(path, sweep_page(study, self._sweep, rows, self._folder))
        return path


def sweep_page(study: Study, sweep: SweepFile, rows: list[Row], folder: Path) -> str:
    """Return the page of a sweep.

    Args:
        study: with the trials.
        sweep: what the sweep file says.
        rows: the finished trials, the best first.
        folder: of the sweep, which contains the folders of the trials.
    """
    title = f"sweep {folder.resolve().name}"
    parts = [_head(study, sweep, title)]
    if rows:
        parts += [
            _history(sweep, rows),
            _learning_curves(sweep, rows, folder),
            _parameters(study, sweep, rows),
        ]
    parts += [_trials(sweep, rows, folder), _best(sweep, rows), _file(sweep)]
    return page(title, [part for part in parts if part])


def _head(study: Study, sweep: SweepFile, title: str) -> str:
    counts = Counter(trial.state.name.lower() for trial in study.trials)
    states = [f"{counts[state]} {name}" for state, name in STATES.items() if counts[state]]
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    facts = [f"{sum(counts.values())} trials: {', '.join(states) or 'none yet'}", f"written {now}"]
    goal = "largest" if sweep.is_maximized else "smallest"
    how = f"{sweep.method} search for the {goal} {sweep.metric}"
    if sweep.hyperband is not None:
        how += (
            f"; after {sweep.hyperband.min_iter} evaluations and each {sweep.hyperband.eta} times"
            f" as many, one trial in {sweep.hyperband.eta} continues"
        )
    return "\n".join(
        [
            f"<h1>{text(title)}</h1>",
            f"<div>{text(' · '.join(facts))}</div>",
            f'<div class="faint">{text(how)}</div>',
        ]
    )


def _history(sweep: SweepFile, rows: Sequence[Row]) -> str:
    """Return a chart of each trial's value, and the best so far."""
    curves = [
        _marks(STATES[state], [(row.trial, row.value) for row in rows if row.state == state])
        for state in ("complete", "pruned")
    ]
    complete = sorted(
        (row.trial, row.value) for row in rows if row.state == "complete" and row.value is not None
    )
    best = np.maximum.accumulate if sweep.is_maximized else np.minimum.accumulate
    if complete:
        numbers = [trial for trial, _ in complete]
        so_far = best([value for _, value in complete])
        curves.append(curve("best so far", numbers, so_far, bold=True))
    shown = [one for one in curves if one["x"]]
    if not shown:
        return ""
    axes = [{"name": "trial", "key": "x"}]
    return section("History", chart("history", "History", [_group(sweep, shown)], axes=axes))


def _is_complete(row: Row) -> bool:
    return row.state == "complete" and row.value is not None


def _marks(name: str, points: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    """Return points that are not joined, without those whose value is not known."""
    known = [(x, y) for x, y in points if y is not None]
    return curve(name, [x for x, _ in known], [y for _, y in known], is_line=False)


def _group(sweep: SweepFile, curves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"name": sweep.metric, "curves": curves, "bounded": is_bounded(sweep.metric)}


def _learning_curves(sweep: SweepFile, rows: Sequence[Row], folder: Path) -> str:
    """Return a chart of the metric in the course of the best trials, averaged over seeds."""
    curves = []
    for row in [row for row in rows if row.state != "fail"][:MAX_CURVES]:
        of_seeds = [_curve_of(run, sweep.metric) for run in _runs(sweep, row, folder)]
        steps, values = mean_curve([one for one in of_seeds if one[0]])
        if steps:
            curves.append(curve(_label(sweep, row), steps, values))
    if not curves:
        return ""
    caption = ""
    if len(rows) > len(curves):
        caption = f'<p class="faint">{text(f"the best {len(curves)} trials")}</p>'
    drawn = chart("curves", "Learning curves", [_group(sweep, curves)], axes=[STEPS])
    return section("Learning curves, mean of the seeds", caption, drawn)


def _label(sweep: SweepFile, row: Row) -> str:
    names = short_names([parameter.name for parameter in sweep.parameters])
    chosen = [f"{names[n]} {_value(v)}" for n, v in row.parameters.items() if n in names]
    return ", ".join([f"{row.trial}", *chosen])


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _runs(sweep: SweepFile, row: Row, folder: Path) -> list[Path]:
    """Return the newest folder of each of a trial's runs that there are."""
    found = [versions(str(folder), run_name(row.trial, seed)) for seed in sweep.seeds]
    return [folders[-1] for folders in found if folders]


def _curve_of(run: Path, metric: str) -> Curve:
    try:
        return finite(read_metrics(run).get(metric, ([], [])))
    except (OSError, ValueError):  # deleted or damaged
        return [], []


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves at the env steps of the shortest one, as far as all have got.

    Args:
        curves: of the seeds, none of them empty.
    """
    if not curves:
        return [], []
    first = max(steps[0] for steps, _ in curves)
    last = min(steps[-1] for steps, _ in curves)
    shared = [
        step for step in min((steps for steps, _ in curves), key=len) if first <= step <= last
    ]
    values = np.mean([np.interp(shared, *one) for one in curves], axis=0)
    return shared, values.tolist()


def _parameters(study: Study, sweep: SweepFile, rows: list[Row]) -> str:
    """Return each parameter's importance, and the results by its values."""
    complete = [row for row in rows if _is_complete(row)]
    names = short_names([parameter.name for parameter in sweep.parameters])
    found = importances(study, sweep, rows)
    shown = f'<p class="faint">{text(f"needs {MIN_TRIALS} complete trials")}</p>'
    if found:
        caption = "share of the differences that each parameter explains (PED-ANOVA)"
        shares = bars({names[name]: share for name, share in found.items()})
        shown = f'<p class="faint">{text(caption)}</p>\n{shares}'
    charts = [
        _chart_of(sweep, parameter, names[parameter.name], place, complete)
        for place, parameter in enumerate(sweep.parameters)
        if len({row.parameters.get(parameter.name) for row in complete}) > 1
    ]
    if not charts and not found:
        return ""
    return section("Parameters", shown, f'<div class="charts">{"".join(charts)}</div>')


def _chart_of(
    sweep: SweepFile, parameter: Parameter, name: str, place: int, complete: Sequence[Row]
) -> str:
    """Return a small chart of the results by the values of one parameter."""
    axis: dict[str, Any] = {"name": name, "key": "x"}
    if parameter.choices:
        axis["labels"] = [_value(choice).rpartition("/")[2] for choice in parameter.choices]
    elif parameter.is_log:
        axis["log"] = True
    points = [(_place(parameter, row.parameters[parameter.name]), row.value) for row in complete]
    group = _group(sweep, [_marks("trial", points)])
    return chart(f"parameter-{place}", name, [group], axes=[axis], small=True, legend=False)


def _place(parameter: Parameter, value: Any) -> float:
    """Return where the axis of a parameter's chart has a value."""
    if parameter.choices:
        return parameter.choices.index(value) if value in parameter.choices else 0
    return float(np.log10(value)) if parameter.is_log else float(value)


def _trials(sweep: SweepFile, rows: Sequence[Row], folder: Path) -> str:
    """Return the table of trials, with a link to the page of every run."""
    names = short_names([parameter.name for parameter in sweep.parameters])
    lines: list[list[Cell]] = [
        ["trial", "state", *names.values(), "pages of the runs", *result_names(sweep)]
    ]
    for row in rows[:MAX_ROWS]:
        pages = [run / REPORT for run in _runs(sweep, row, folder)]
        linked = [
            Link(path.parent.parent.name, path.relative_to(folder).as_posix())
            for path in pages
            if path.is_file()
        ]
        chosen = [_value(row.parameters.get(name, UNKNOWN)) for name in names]
        lines.append([str(row.trial), STATES[row.state], *chosen, linked, *result_cells(row)])
    more = f"; {len(rows) - MAX_ROWS} more are in {TABLE}" if len(rows) > MAX_ROWS else ""
    failed = [["failed trial", "error"]]
    failed += [[str(row.trial), row.error] for row in rows if row.error]
    return section(
        "Trials, the best first",
        html_table(lines, num_texts=3 + len(names)),
        f'<p class="faint">{text(EXPLANATION + more)}</p>',
        html_table(failed, num_texts=2) if len(failed) > 1 else "",
    )


def _best(sweep: SweepFile, rows: Sequence[Row]) -> str:
    """Return the command that trains the best configuration."""
    if not rows or not _is_complete(rows[0]):
        return ""
    arguments = sweep.arguments(rows[0].parameters, sweep.seeds[0])
    command = f"mtrl-lightning {shlex.join(arguments)}"
    return section(f"The best configuration, trial {rows[0].trial}", f"<pre>{text(command)}</pre>")


def _file(sweep: SweepFile) -> str:
    try:
        content = sweep.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # it was moved
        return ""
    return section("Sweep file", f"<pre>{text(content)}</pre>")
