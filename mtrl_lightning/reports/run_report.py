"""report.html of a run: its curves, tables, times, faults and options on one page."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import yaml

from mtrl_lightning.formats import number, whole
from mtrl_lightning.reports.defaults import differences
from mtrl_lightning.reports.metrics_file import Curve, minutes_until, seconds_of_rows
from mtrl_lightning.reports.page import (
    MINUTES,
    STEPS,
    bars,
    chart,
    curve,
    html_table,
    page,
    section,
    text,
    write_page,
)
from mtrl_lightning.reports.record import RunRecord, is_bounded, is_evaluation, read_run

REPORT = "report.html"
ACTIVITIES = {
    "act": "choosing actions",
    "step": "waiting for environments",
    "sample": "drawing batches",
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
TEMPERATURE = "train/temperature"
EPISODES = "rollout/episodes"
CONFLICTS = ("conflicts", "cosine", "weight_min", "weight_max")
"""Ends of the names of what gradient methods log."""
SHOWN_VIDEOS = 12
ALL_TASKS = "all_tasks"
"""Name of the video of all tasks side by side."""


class Status(NamedTuple):
    """What only a server of the page knows."""

    state: str
    """Changes whenever the page would."""
    seconds: float
    """Between two questions whether it has."""
    is_running: bool


def write_report(run_folder: str | Path) -> Path:
    """Write ``report.html`` into a run's folder.

    Args:
        run_folder: the folder with ``metrics.csv``.

    Returns:
        The path of the page.

    Raises:
        ConfigurationError: if it is not the folder of a run.
    """
    path = Path(run_folder) / REPORT
    write_page(path, run_page(read_run(Path(run_folder))))
    return path


def run_page(run: RunRecord, status: Status | None = None) -> str:
    """Return the page of a run.

    Args:
        run: what its folder records.
        status: of a run whose page is served; None for a file.
    """
    title = f"{run.name}/{run.folder.resolve().name}"
    parts = [_head(run, title, status)]
    parts += [
        part
        for part in (
            _evaluations(run),
            *_task_tables(run),
            _videos(run.folder),
            _charts(run),
            _times(run),
            _faults(run),
            _options(run),
        )
        if part
    ]
    if status is None:
        return page(title, parts)
    return page(title, parts, status.state, status.seconds)


def _head(run: RunRecord, title: str, status: Status | None) -> str:
    made = run.env_steps
    total = run.total_steps
    steps = f"{made:,} env steps"
    if total:
        steps = f"{made:,} of {total:,} env steps ({min(1.0, made / total):.0%})"
    now = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    facts = [steps, f"written {now}"]
    if run.seed is not None:
        facts.insert(1, f"seed {run.seed}")
    if status is not None:
        facts[-1] = "in training" if status.is_running else "not in training"
    protocol = ", ".join(f"{key} {value}" for key, value in run.protocol.items())
    versions = ", ".join(f"{key} {value}" for key, value in run.versions.items())
    return "\n".join(
        [
            f"<h1>{text(title)}</h1>",
            f"<div>{text(' · '.join(facts))}</div>",
            f'<div class="faint">{text(protocol)}</div>',
            f'<div class="faint">{text(versions)}</div>',
            '<div class="warning" id="watched" hidden></div>' if status is not None else "",
        ]
    )


def _evaluations(run: RunRecord) -> str:
    metrics = run.evaluated()
    if not metrics:
        return section("Evaluation", "<p>There is none yet.</p>")
    groups = [_group(run, metric, run.tasks_of(metric)) for metric in _preferred_first(metrics)]
    return section("Evaluation", chart("evaluation", "Evaluation", groups, axes=_axes(run)))


def _preferred_first(metrics: Sequence[str]) -> list[str]:
    """Return metrics with success first and the success in the last step after the return."""
    order = ("success", "score", "return", "length")

    def place(metric: str) -> tuple[int, str]:
        quantity = metric.partition("/")[2]
        return (order.index(quantity) if quantity in order else len(order), metric)

    return sorted(metrics, key=place)


def _axes(run: RunRecord) -> list[dict[str, str]]:
    return [STEPS, MINUTES] if minutes_until([0], run.curves) is not None else [STEPS]


def _group(run: RunRecord, metric: str, tasks: Sequence[str] = ()) -> dict[str, Any]:
    """Return a metric's curves: of each task, and the average."""
    curves = [_curve(run, f"{metric}/{task}", task) for task in tasks]
    if metric in run.curves:
        curves.append(_curve(run, metric, "average" if tasks else metric, bold=bool(tasks)))
    return {"name": metric, "curves": curves, "bounded": is_bounded(metric)}


def _curve(run: RunRecord, metric: str, name: str, bold: bool = False) -> dict[str, Any]:
    steps, values = run.curves[metric]
    return curve(name, steps, values, minutes_until(steps, run.curves), bold=bold)


def _task_tables(run: RunRecord) -> Iterator[str]:
    """Yield a table of the last evaluation for each split."""
    by_split: dict[str, list[str]] = {}
    for metric in _preferred_first(run.evaluated()):
        by_split.setdefault(metric.partition("/")[0], []).append(metric)
    for split, metrics in by_split.items():
        tasks = sorted({task for metric in metrics for task in run.tasks_of(metric)})
        head = ["task"]
        for metric in metrics:
            head += [metric.partition("/")[2], "best"]
        trained = [
            metric
            for metric in ("rollout/success", "rollout/return", EPISODES, TEMPERATURE)
            if any(f"{metric}/{task}" in run.curves for task in tasks)
        ]
        lines = [[*head, *trained]]
        for task, suffix in [*((t, f"/{t}") for t in tasks), ("average", "")]:
            cells = [task]
            for metric in metrics:
                steps_and_values = run.curves.get(f"{metric}{suffix}")
                cells += [_last(steps_and_values), _best(steps_and_values)]
            for metric in trained:
                last = _last_value(run.curves.get(f"{metric}{suffix}"))
                cells.append(whole(last) if metric == EPISODES else number(last))
            lines.append(cells)
        curves = [run.curves[f"{one}/{task}"] for one in metrics for task in run.tasks_of(one)]
        last = max(steps[-1] for steps, _ in curves)
        caption = f'<p class="faint">{text(split)}, after {last:,} env steps</p>'
        yield section("Tasks", caption, html_table(lines))


def _last(found: Curve | None) -> str:
    return number(_last_value(found))


def _last_value(found: Curve | None) -> float | None:
    return None if found is None else found[1][-1]


def _best(found: Curve | None) -> str:
    return number(None if found is None else float(np.fmax.reduce(found[1])))


def _charts(run: RunRecord) -> str:
    """Return the charts of what is logged while a run trains."""
    shown = [
        _chart_of(run, "temperatures", "Temperatures", [TEMPERATURE]),
        _chart_of(run, "conflicts", "Gradient conflicts", _conflicts(run)),
        _chart_of(run, "episodes", "Training episodes", _preferred_first(_named(run, "rollout"))),
        _chart_of(run, "learning", "Learning", _named(run, "train")),
    ]
    return "\n".join(one for one in shown if one)


def _chart_of(run: RunRecord, name: str, title: str, metrics: Sequence[str]) -> str:
    groups = []
    for metric in metrics:
        tasks = run.tasks_of(metric)
        if tasks or metric in run.curves:
            groups.append(_group(run, metric, tasks))
    return section(title, chart(name, title, groups, axes=_axes(run))) if groups else ""


def _conflicts(run: RunRecord) -> list[str]:
    return [name for name in _base_names(run) if name.endswith(CONFLICTS)]


def _named(run: RunRecord, room: str) -> list[str]:
    """Return the metrics of a group that no other chart shows."""
    others = {TEMPERATURE, *_conflicts(run)}
    return [n for n in _base_names(run) if n.partition("/")[0] == room and n not in others]


def _base_names(run: RunRecord) -> list[str]:
    """Return the names of all metrics but evaluations', without the tasks at their ends."""
    names: dict[str, None] = {}
    tasks = {task for metric in run.evaluated() for task in run.tasks_of(metric)}
    ends = tuple(f"/{task}" for task in sorted(tasks, key=len, reverse=True))
    for name in run.curves:
        if not is_evaluation(name):
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
        steps_and_values = run.curves.get(f"time/{name}_fraction")
        if steps_and_values is not None and total and len(steps_and_values[1]) == len(seconds):
            shares[name] = float(seconds @ np.array(steps_and_values[1]) / total)
    return shares


def _times(run: RunRecord) -> str:
    shares = {ACTIVITIES[name]: share for name, share in shares_of_time(run).items()}
    minutes = minutes_until([run.env_steps], run.curves)
    if minutes is None:
        return ""
    rate = run.env_steps / (60 * minutes[0]) if minutes[0] else 0.0
    total = f"<p>{minutes[0]:.1f} minutes, {rate:,.0f} env steps per second on average</p>"
    speeds = _chart_of(
        run, "speed", "Speed", ["time/env_steps_per_second", "time/updates_per_second"]
    )
    return section("Where the time went", total, bars(shares)) + speeds


def _faults(run: RunRecord) -> str:
    counts = {
        what: run.curves[f"fault/{name}"][1][-1]
        for name, what in FAULTS.items()
        if f"fault/{name}" in run.curves
    }
    if not counts:
        return ""
    if not any(counts.values()):
        return section("Faults survived", "<p>None.</p>")
    lines = [["fault", "count"], *([what, f"{count:,.0f}"] for what, count in counts.items())]
    return section("Faults survived", html_table(lines))


def _options(run: RunRecord) -> str:
    if not run.options:
        return ""
    lines = [["option", "value", "default"]]
    lines += [
        [one.name, _value_text(one.value), _value_text(one.default)]
        for one in differences(run.options)
    ]
    everything = yaml.safe_dump(run.options, sort_keys=False, allow_unicode=True)
    return section(
        "Options that differ from the defaults",
        html_table(lines, num_texts=3),
        f"<details><summary>all options</summary><pre>{text(everything)}</pre></details>",
    )


def _value_text(value: Any) -> str:
    return "null" if value is None else str(value)


def _videos(folder: Path) -> str:
    """Return the newest videos, and links to the others."""
    by_step = sorted({path.parent for path in folder.glob("videos/**/*.mp4")}, reverse=True)
    if not by_step:
        return ""
    newest = sorted(by_step[0].glob("*.mp4"), key=lambda path: (path.stem != ALL_TASKS, path.stem))
    shown = [
        f'<figure><video controls preload="none" src="{_link(path, folder)}"></video>'
        f"<figcaption>{text(path.parent.name)} {text(path.stem)}</figcaption></figure>"
        for path in newest[:SHOWN_VIDEOS]
    ]
    others = [*newest[SHOWN_VIDEOS:], *(p for step in by_step[1:] for p in sorted(step.glob("*")))]
    links = [
        f'<li><a href="{_link(path, folder)}">{text(path.relative_to(folder))}</a></li>'
        for path in others
        if path.suffix == ".mp4"
    ]
    more = f"<details><summary>others</summary><ul>{''.join(links)}</ul></details>" if links else ""
    return section("Videos", f'<div class="videos">{"".join(shown)}</div>', more)


def _link(path: Path, folder: Path) -> str:
    return text(quote(path.relative_to(folder).as_posix()))
