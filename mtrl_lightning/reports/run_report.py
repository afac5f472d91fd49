"""report.html and curves.png of a run: its curves, tasks, times, faults and options."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

from mtrl_lightning.formats import UNKNOWN, number
from mtrl_lightning.reports.charts import Chart, Curve, save_png
from mtrl_lightning.reports.metrics_file import minutes_until
from mtrl_lightning.reports.record import (
    RunRecord,
    is_bounded,
    metric_order,
    read_run,
)
from mtrl_lightning.reports.render import REPORT, Page, Section, write_page
from mtrl_lightning.reports.statistics import Estimate

CURVES = "curves.png"
FILES = (CURVES, "metrics.csv", "config.yaml", "hparams.yaml", "videos")
GROUPS = {
    "rollout": "Training episodes",
    "train": "Learning",
    "time": "Where the time went",
}
"""First parts of the names of metrics, each with the title of its section."""
SHARE = "_fraction"
"""End of the names of the metrics that are a share of the time."""
FAULT = "fault/"
"""Start of the names of the metrics that count faults."""
MAX_VIDEOS = 12


def write_report(run_folder: str | Path, refresh_seconds: int = 0) -> Path:
    """Write ``report.html`` into a run's folder, and return its path.

    Args:
        run_folder: the folder with ``metrics.csv``.
        refresh_seconds: after which a browser reloads the page; 0 for never.

    Raises:
        ConfigurationError: if it is not the folder of a run.
    """
    path = Path(run_folder) / REPORT
    write_page(path, run_page(read_run(Path(run_folder)), refresh_seconds))
    return path


def plot_curves(run_folder: str | Path) -> Path:
    """Plot the metrics of evaluations, by task and on average, and return the plot's path.

    Where several splits are evaluated, each has a row, below one that compares their averages.

    Args:
        run_folder: The folder with ``metrics.csv``; the plot is ``curves.png`` in it.

    Raises:
        ConfigurationError: if it is not the folder of a run.
    """
    charts = evaluation_charts(read_run(Path(run_folder)))
    num_quantities = len({chart.title.rpartition("/")[2] for chart in charts})
    return save_png(charts, Path(run_folder) / CURVES, columns=num_quantities)


def run_page(run: RunRecord, refresh_seconds: int = 0) -> Page:
    """Return the page of a run.

    Args:
        run: the record of its folder.
        refresh_seconds: see ``write_report``.
    """
    evaluation = evaluation_charts(run)
    videos = sorted(run.folder.glob("videos/**/*.mp4"), key=lambda path: path.parent.name)
    newest = [path for path in videos if path.parent == videos[-1].parent][:MAX_VIDEOS]
    options = yaml.safe_dump(run.options, sort_keys=False, allow_unicode=True)
    sections = [
        Section("Evaluation", "" if evaluation else "There is none yet.", evaluation),
        *_task_tables(run),
        Section("Videos", videos=[path.relative_to(run.folder).as_posix() for path in newest]),
        *(Section(title, charts=_group_charts(run, name)) for name, title in GROUPS.items()),
        Section("Options", details=options if run.options else ""),
        Section("Files", links=[name for name in FILES if (run.folder / name).exists()]),
    ]
    return Page(
        f"{run.name}/{run.folder.resolve().name}",
        list(_facts(run, refresh_seconds)),
        sections,
        refresh_seconds=refresh_seconds,
    )


def _facts(run: RunRecord, refresh_seconds: int) -> Iterator[str]:
    """Yield lines of text: how far the run is, its protocol, its versions and its faults."""
    steps = f"{run.env_steps:,} {run.step_unit}"
    if run.total_steps:
        share = min(1.0, run.env_steps / run.total_steps)
        steps = f"{run.env_steps:,} of {run.total_steps:,} {run.step_unit} ({share:.0%})"
    facts = [steps]
    minutes = minutes_until([run.env_steps], run.curves)
    if minutes is not None:
        facts.append(f"{minutes[0]:.1f} minutes")
    if run.seed is not None:
        facts.append(f"seed {run.seed}")
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    facts.append(f"written {now}")
    if refresh_seconds:
        facts.append(f"in training: the page reloads every {refresh_seconds} seconds")
    yield " · ".join(facts)
    for recorded in (run.protocol, run.versions):
        if recorded:
            yield ", ".join(f"{key} {value}" for key, value in recorded.items())
    counts = {
        name.removeprefix(FAULT).replace("_", " "): values[-1]
        for name, (_, values) in run.curves.items()
        if name.startswith(FAULT)
    }
    faults = [f"{name} {count:.0f}" for name, count in counts.items() if count]
    if counts:
        yield f"faults survived: {', '.join(faults) or 'none'}"


def evaluation_charts(run: RunRecord) -> list[Chart]:
    """Return a chart of each metric of evaluations; of several splits, first one of all of them."""
    metrics = run.evaluated()
    splits = sorted({metric.partition("/")[0] for metric in metrics})
    charts = []
    if len(splits) > 1:
        for quantity in dict.fromkeys(metric.partition("/")[2] for metric in metrics):
            averages = [
                Curve(split, *_points(run, f"{split}/{quantity}"), index)
                for index, split in enumerate(splits)
                if f"{split}/{quantity}" in run.curves
            ]
            charts.append(Chart(quantity, averages, is_bounded(quantity), run.step_unit))
    by_split = sorted(metrics, key=lambda metric: metric.partition("/")[0])
    return charts + [task_chart(run, metric) for metric in by_split]


def task_chart(run: RunRecord, metric: str) -> Chart:
    """Return the chart of a metric: a curve of each task, and the average."""
    names = run.tasks_of(metric)
    curves = [
        Curve(name, *_points(run, f"{metric}/{name}"), index) for index, name in enumerate(names)
    ]
    if metric in run.curves:
        curves.append(Curve("average", *_points(run, metric), None if names else 0))
    return Chart(metric, curves, is_bounded(metric), run.step_unit)


def _points(run: RunRecord, metric: str) -> tuple[list[int], Estimate]:
    env_steps, values = run.curves[metric]
    return env_steps, Estimate(values)


def _group_charts(run: RunRecord, group: str) -> list[Chart]:
    """Return the charts of a group's metrics; shares of the time are in one chart."""
    names = {"/".join(name.split("/")[:2]) for name in run.curves if name.startswith(f"{group}/")}
    shares = sorted(name for name in names if name.endswith(SHARE))
    charts = [task_chart(run, name) for name in sorted(names.difference(shares), key=metric_order)]
    if shares:
        curves = [
            Curve(name.removeprefix(f"{group}/").removesuffix(SHARE), *_points(run, name), index)
            for index, name in enumerate(shares)
        ]
        charts.append(Chart("share of the time", curves, True, run.step_unit))
    return charts


def _task_tables(run: RunRecord) -> Iterator[Section]:
    """Yield a table of the last evaluation for each split."""
    by_split: dict[str, list[str]] = {}
    for metric in run.evaluated():
        by_split.setdefault(metric.partition("/")[0], []).append(metric)
    for split, metrics in by_split.items():
        tasks = sorted({task for metric in metrics for task in run.tasks_of(metric)})
        lines = [["task"]]
        for metric in metrics:
            lines[0] += [metric.partition("/")[2], "best"]
        for task, suffix in [*((task, f"/{task}") for task in tasks), ("average", "")]:
            cells = [_last_and_best(run, f"{metric}{suffix}") for metric in metrics]
            lines.append([task, *(text for pair in cells for text in pair)])
        end = max(run.curves[f"{name}/{t}"][0][-1] for name in metrics for t in run.tasks_of(name))
        yield Section("Tasks", f"{split}, after {end:,} {run.step_unit}", table=lines)


def _last_and_best(run: RunRecord, metric: str) -> Sequence[str]:
    if metric not in run.curves:
        return UNKNOWN, UNKNOWN
    values = run.curves[metric][1]
    return number(values[-1]), number(float(np.fmax.reduce(values)))
