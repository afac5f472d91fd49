"""report.html of a run: its curves, tables, times, faults and options on one page."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mtrl_lightning.formats import UNKNOWN, number, whole
from mtrl_lightning.reports.charts import Chart, Curve
from mtrl_lightning.reports.defaults import differences
from mtrl_lightning.reports.metrics_file import minutes_until, seconds_of_rows
from mtrl_lightning.reports.record import RunRecord, is_bounded, is_evaluation, read_run
from mtrl_lightning.reports.render import (
    REPORT,
    Details,
    Link,
    Page,
    Section,
    Table,
    Trend,
    trend,
    write_page,
)

ACTIVITIES = {
    "act": "choosing actions",
    "step": "waiting for environments",
    "sample": "sampling batches",
    "update": "updates",
    "evaluate": "evaluations",
    "checkpoint": "checkpoints",
}
"""What ``time/<name>_fraction`` is the share of."""
FAULTS = {
    "worker_restarts": "environments rebuilt after a fault",
    "dropped_transitions": "transitions dropped with them",
    "skipped_updates": "updates skipped, as a gradient was not finite",
}
FILES = ("curves.png", "metrics.csv", "config.yaml", "hparams.yaml")
TEMPERATURE = "train/temperature"
EPISODES = "rollout/episodes"
SPEEDS = ("time/env_steps_per_second", "time/updates_per_second")
CONFLICTS = ("conflicts", "cosine", "weight_min", "weight_max")
"""Ends of the names of what gradient methods log."""
QUANTITIES = ("success", "score", "return", "length")
"""Metrics are in this order, others after them."""
SHOWN_VIDEOS = 12
ALL_TASKS = "all_tasks"
"""Name of the video of all tasks side by side."""


def write_report(run_folder: str | Path, refresh_seconds: int = 0) -> Path:
    """Write ``report.html`` into a run's folder.

    Args:
        run_folder: the folder with ``metrics.csv``.
        refresh_seconds: after which a browser loads the page again; 0 for never.

    Returns:
        The path of the page.

    Raises:
        ConfigurationError: if it is not the folder of a run.
    """
    path = Path(run_folder) / REPORT
    write_page(path, run_page(read_run(Path(run_folder)), refresh_seconds))
    return path


def run_page(run: RunRecord, refresh_seconds: int = 0) -> Page:
    """Return the page of a run.

    Args:
        run: what its folder records.
        refresh_seconds: see ``write_report``.
    """
    trained = {TEMPERATURE, *_conflicts(run)}
    rollouts = [name for name in _base_names(run, "rollout") if name not in trained]
    losses = [name for name in _base_names(run, "train") if name not in trained]
    sections = [
        _evaluations(run),
        *_task_tables(run),
        _videos(run.folder),
        _section(run, "Temperatures", [TEMPERATURE]),
        _section(run, "Gradient conflicts", _conflicts(run)),
        _section(run, "Training episodes", sorted(rollouts, key=_order)),
        _section(run, "Learning", losses),
        _times(run),
        _faults(run),
        _options(run),
        _files(run.folder),
    ]
    return Page(
        f"{run.name}/{run.folder.resolve().name}",
        _facts(run, refresh_seconds),
        [section for section in sections if section is not None],
        refresh_seconds=refresh_seconds,
    )


def _facts(run: RunRecord, refresh_seconds: int) -> list[str]:
    steps = f"{run.env_steps:,} env steps"
    if run.total_steps:
        share = min(1.0, run.env_steps / run.total_steps)
        steps = f"{run.env_steps:,} of {run.total_steps:,} env steps ({share:.0%})"
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    facts = [steps, f"written {now}"]
    if run.seed is not None:
        facts.insert(1, f"seed {run.seed}")
    if refresh_seconds:
        facts.append(f"in training: the page is loaded again every {refresh_seconds} seconds")
    recorded = (run.protocol, run.versions)
    return [
        " · ".join(facts),
        *(", ".join(f"{key} {value}" for key, value in one.items()) for one in recorded if one),
    ]


def _evaluations(run: RunRecord) -> Section:
    metrics = run.evaluated()
    if not metrics:
        return Section("Evaluation", ["There is none yet."])
    return Section(
        "Evaluation", charts=[task_chart(run, name) for name in sorted(metrics, key=_order)]
    )


def _order(metric: str) -> tuple[int, str]:
    quantity = metric.partition("/")[2]
    place = QUANTITIES.index(quantity) if quantity in QUANTITIES else len(QUANTITIES)
    return place, metric


def _section(run: RunRecord, title: str, metrics: Sequence[str]) -> Section | None:
    """Return a section with a chart for each metric that was logged."""
    logged = [name for name in metrics if name in run.curves or run.tasks_of(name)]
    return Section(title, charts=[task_chart(run, name) for name in logged]) if logged else None


def task_chart(run: RunRecord, metric: str) -> Chart:
    """Return the chart of a metric: a curve of each task, and the average."""
    tasks = run.tasks_of(metric)
    curves = [
        Curve(task, *run.curves[f"{metric}/{task}"], index) for index, task in enumerate(tasks)
    ]
    if metric in run.curves:
        index = None if tasks else 0
        curves.append(Curve("average", *run.curves[metric], index))
    return Chart(metric, curves, is_bounded(metric))


def _task_tables(run: RunRecord) -> Iterator[Section]:
    """Yield a table of the last evaluation for each split."""
    by_split: dict[str, list[str]] = {}
    for metric in sorted(run.evaluated(), key=_order):
        by_split.setdefault(metric.partition("/")[0], []).append(metric)
    for split, metrics in by_split.items():
        tasks = sorted({task for metric in metrics for task in run.tasks_of(metric)})
        trained = [
            metric
            for metric in ("rollout/success", "rollout/return", EPISODES, TEMPERATURE)
            if any(f"{metric}/{task}" in run.curves for task in tasks)
        ]
        head = ["task"]
        for metric in metrics:
            head += [metric.partition("/")[2], "best"]
        lines: list[list[str | Trend]] = [[*head, *trained]]
        for task, suffix in [*((task, f"/{task}") for task in tasks), ("average", "")]:
            cells: list[str | Trend] = [task]
            for metric in metrics:
                cells += _last_and_best(run, metric, suffix)
            cells += [_last(run, metric, suffix) for metric in trained]
            lines.append(cells)
        curves = [run.curves[f"{name}/{task}"] for name in metrics for task in run.tasks_of(name)]
        end = max(steps[-1] for steps, _ in curves)
        yield Section("Tasks", [f"{split}, after {end:,} env steps"], table=Table(lines))


def _last_and_best(run: RunRecord, metric: str, suffix: str) -> list[str | Trend]:
    """Return the last value of a metric with its curve, and the best value."""
    if f"{metric}{suffix}" not in run.curves:
        return [UNKNOWN, UNKNOWN]
    values = run.curves[f"{metric}{suffix}"][1]
    best = float(np.fmax.reduce(values))
    low = 0.0 if is_bounded(metric) else float(np.fmin.reduce(values))
    high = 1.0 if is_bounded(metric) else best
    return [trend(number(values[-1]), values, low, high), number(best)]


def _last(run: RunRecord, metric: str, suffix: str) -> str:
    if f"{metric}{suffix}" not in run.curves:
        return UNKNOWN
    value = run.curves[f"{metric}{suffix}"][1][-1]
    return whole(value) if metric == EPISODES else number(value)


def _conflicts(run: RunRecord) -> list[str]:
    return [name for name in _base_names(run) if name.endswith(CONFLICTS)]


def _base_names(run: RunRecord, group: str | None = None) -> list[str]:
    """Return the names of a group's metrics, without the tasks at their ends.

    Args:
        run: which logged them.
        group: before the slash; None for all groups but evaluations.
    """
    names: dict[str, None] = {}
    tasks = {task for metric in run.evaluated() for task in run.tasks_of(metric)}
    ends = tuple(f"/{task}" for task in sorted(tasks, key=len, reverse=True))
    for name in run.curves:
        if not is_evaluation(name) and group in (None, name.partition("/")[0]):
            end = next((end for end in ends if name.endswith(end)), "")
            names[name.removesuffix(end)] = None
    return sorted(names)


def shares_of_time(run: RunRecord) -> dict[str, float]:
    """Return the share of a run's time that each activity took, over all rows of metrics."""
    seconds = seconds_of_rows(run.curves)
    if seconds is None:
        return {}
    total = seconds.sum()
    shares = {}
    for name in ACTIVITIES:
        curve = run.curves.get(f"time/{name}_fraction")
        if curve is not None and total and len(curve[1]) == len(seconds):
            shares[name] = float(seconds @ np.array(curve[1]) / total)
    return shares


def _times(run: RunRecord) -> Section | None:
    minutes = minutes_until([run.env_steps], run.curves)
    if minutes is None:
        return None
    shares = [(ACTIVITIES[name], share) for name, share in shares_of_time(run).items()]
    rate = run.env_steps / (60 * minutes[0]) if minutes[0] else 0.0
    return Section(
        "Where the time went",
        [f"{minutes[0]:.1f} minutes, {rate:,.0f} env steps per second on average"],
        [task_chart(run, name) for name in SPEEDS if name in run.curves],
        sorted(shares, key=lambda item: -item[1]),
    )


def _faults(run: RunRecord) -> Section | None:
    counts = {
        fault: run.curves[f"fault/{name}"][1][-1]
        for name, fault in FAULTS.items()
        if f"fault/{name}" in run.curves
    }
    if not counts:
        return None
    if not any(counts.values()):
        return Section("Faults survived", ["None."])
    lines = [["fault", "count"], *([fault, whole(count)] for fault, count in counts.items())]
    return Section("Faults survived", table=Table(lines))


def _options(run: RunRecord) -> Section | None:
    if not run.options:
        return None
    lines = [["option", "value", "default"]]
    lines += [
        [name, _value_text(value), _value_text(default)]
        for name, value, default in differences(run.options)
    ]
    everything = yaml.safe_dump(run.options, sort_keys=False, allow_unicode=True)
    return Section(
        "Options that differ from the defaults",
        table=Table(lines, num_texts=3),
        details=Details("all options", everything),
    )


def _value_text(value: Any) -> str:
    return "null" if value is None else str(value)


def _videos(folder: Path) -> Section | None:
    """Return the newest videos, and links to the others."""
    by_step = sorted({path.parent for path in folder.glob("videos/**/*.mp4")}, reverse=True)
    if not by_step:
        return None
    newest = sorted(by_step[0].glob("*.mp4"), key=lambda path: (path.stem != ALL_TASKS, path.stem))
    others = [path for step in by_step[1:] for path in sorted(step.glob("*.mp4"))]
    return Section(
        "Videos",
        videos=[
            Link(f"{path.parent.name} {path.stem}", path.relative_to(folder).as_posix())
            for path in newest[:SHOWN_VIDEOS]
        ],
        links=[_link(path, folder) for path in [*newest[SHOWN_VIDEOS:], *others]],
    )


def _files(folder: Path) -> Section:
    return Section(
        "Files", links=[_link(folder / n, folder) for n in FILES if (folder / n).exists()]
    )


def _link(path: Path, folder: Path) -> Link:
    name = path.relative_to(folder).as_posix()
    return Link(name, name)
