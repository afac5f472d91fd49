"""Comparison of methods: curves over seeds, summary statistics per method, tables.

Shapes: ``S`` seeds, ``T`` tasks, ``N`` evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.compare.methods import Method, group
from mtrl_lightning.compare.record import ENV_STEPS, RunRecord, find_runs, read_run
from mtrl_lightning.compare.statistics import (
    Estimate,
    Scores,
    interquartile_mean,
    mean,
    probability_of_improvement,
)
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.utils.text import number, whole, with_interval

FEW_SEEDS = {1: "one seed, no interval", 2: "two seeds, an interval that is much too narrow"}
"""Warnings about the interval by number of seeds."""
THRESHOLD = 0.8
"""Default threshold of the mean over tasks, for metrics between 0 and 1."""
AVERAGE = "average"
"""Name of the curve averaged over tasks."""


class Curves(NamedTuple):
    """Learning curves of a method's runs."""

    scores_STN: Scores
    minutes_SN: Scores | None
    """Training minutes until each evaluation, including evaluations and checkpoints."""


class Comparison(NamedTuple):
    """Methods with their curves on common tasks, at common environment steps."""

    metric: str
    tasks: tuple[str, ...]
    env_steps_N: npt.NDArray[np.int64]
    """Ends at the largest number of environment steps that all runs have reached."""
    methods: list[Method]
    curves: dict[str, Curves]
    """Curves by method label."""
    bands: dict[str, dict[str, Estimate]]
    """Interquartile mean ``[N]`` by task name, or ``average``, and method label."""
    warnings: list[str]
    step_unit: str = ENV_STEPS
    """Unit of the runs' steps."""

    @property
    def end(self) -> int:
        """Environment steps at which methods are compared."""
        return int(self.env_steps_N[-1])


def compare_runs(
    given: Sequence[str], metric: str | None = None, across_protocols: bool = False
) -> Comparison:
    """Read runs, group them into methods, and align their evaluations.

    Args:
        given: run folders, or folders that contain runs; ``LABEL=FOLDER`` sets the name of their
            method.
        metric: metric with values per task, such as ``eval/success``; None for the first of
            success, score and return that all runs have.
        across_protocols: whether to compare runs with different protocols.
    """
    warnings: list[str] = []
    labelled = _read(given, warnings)
    runs = [run for _, run in labelled]
    differences = protocol_differences(runs)
    if differences and not across_protocols:
        raise ConfigurationError(
            "the runs have different protocols, so that their numbers are not comparable:"
            f" {'; '.join(differences)}. Exclude some, or compare them nevertheless with"
            " --across_protocols"
        )
    warnings[:0] = [f"RUNS OF DIFFERENT PROTOCOLS ARE COMPARED: {text}" for text in differences]
    methods = group(labelled)
    metric, tasks = _common_metric(runs, metric)
    for num_seeds, meaning in FEW_SEEDS.items():
        few = [method.label for method in methods if len(method.runs) == num_seeds]
        if few:
            warnings.append(f"{meaning}: {', '.join(few)}. Train with another --seed_everything")
    # the steps of the average are not used, because it may include other tasks
    unit = " or ".join(sorted({run.step_unit for run in runs}))
    env_steps_N = _common_steps(runs, f"{metric}/{tasks[0]}", unit, warnings)
    curves = {}
    for method in methods:
        scores = [
            [np.interp(env_steps_N, *run.curves[f"{metric}/{task}"]) for task in tasks]
            for run in method.runs
        ]
        minutes = [run.minutes_until(env_steps_N) for run in method.runs]
        known = [one for one in minutes if one is not None]
        minutes_SN = np.array(known) if len(known) == len(minutes) else None
        curves[method.label] = Curves(np.array(scores), minutes_SN)
    slices = {AVERAGE: slice(None), **{task: slice(i, i + 1) for i, task in enumerate(tasks)}}
    bands = {
        name: {
            label: interquartile_mean(one.scores_STN[:, indices]) for label, one in curves.items()
        }
        for name, indices in slices.items()
    }
    return Comparison(metric, tasks, env_steps_N, methods, curves, bands, warnings, unit)


def _read(given: Sequence[str], warnings: list[str]) -> list[tuple[str | None, RunRecord]]:
    """Read each run once, with the label that precedes ``=``."""
    labelled: dict[Path, tuple[str | None, RunRecord]] = {}
    for word in given:
        label, _, rest = word.partition("=")
        has_label = bool(rest) and not Path(word).exists()
        runs = [read_run(folder) for folder in find_runs(Path(rest if has_label else word))]
        for run in runs:
            if run.evaluated():
                labelled.setdefault(run.folder.resolve(), (label if has_label else None, run))
            else:
                warnings.append(f"{run.folder} is excluded: it has no evaluations")
        if not any(run.evaluated() for run in runs):
            raise ConfigurationError(
                f"{word} has no evaluations yet: wait for the first one, or lower evaluation.every"
            )
    return list(labelled.values())


def protocol_differences(runs: Sequence[RunRecord]) -> list[str]:
    """Return the differences between the protocols of runs, one clause each.

    Runs without a recorded protocol are compared only by their tasks.
    """
    keys = dict.fromkeys(key for run in runs for key in run.protocol)
    first: dict[str, tuple[RunRecord, Any]] = {}
    differences: dict[str, str] = {}
    for run in runs:
        parts = {key: run.protocol.get(key) for key in keys} if run.protocol else {}
        evaluation = run.section("evaluation")
        if evaluation:
            parts["test episodes per task"] = evaluation.get("num_episodes")
        tasks = {task for metric in run.evaluated() for task in run.tasks_of(metric)}
        parts["evaluated tasks"] = ", ".join(sorted(tasks))
        for key, value in parts.items():
            other, first_value = first.setdefault(key, (run, value))
            if value != first_value:
                text = f"{key} is {first_value} in {other.folder} and {value} in {run.folder}"
                differences.setdefault(key, text)
    return list(differences.values())


def _common_metric(runs: Sequence[RunRecord], metric: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the metric and its tasks common to all runs, preferring the split ``eval``."""
    if metric is None:
        shared = [name for name in runs[0].evaluated() if all(name in r.evaluated() for r in runs)]
        metric = min(shared, key=lambda name: not name.startswith("eval/"), default="metric")
    tasks = set.intersection(*(set(run.tasks_of(metric)) for run in runs))
    if not tasks:
        evaluated = [f"{run.folder} has {', '.join(run.evaluated())}" for run in runs]
        raise ConfigurationError(
            f"the runs have no {metric} of a task in common: {'; '.join(evaluated)}. Choose another"
            " --metric, or exclude some runs"
        )
    return metric, tuple(sorted(tasks))


def _common_steps(
    runs: Sequence[RunRecord], name: str, unit: str, warnings: list[str]
) -> npt.NDArray[np.int64]:
    """Return the evaluation steps of the run with the fewest evaluations, up to the common end."""
    all_steps = [np.array(run.curves[name][0]) for run in runs]
    start = max(steps[0] for steps in all_steps)
    end = min(steps[-1] for steps in all_steps)
    if start > end:
        ranges = [
            f"{run.folder} from {steps[0]:,} to {steps[-1]:,}"
            for run, steps in zip(runs, all_steps, strict=True)
        ]
        raise ConfigurationError(
            f"the runs were evaluated at {unit} that do not overlap:"
            f" {'; '.join(ranges)}. Exclude some runs"
        )
    fewest_N = min(all_steps, key=len)
    env_steps_N = np.union1d(fewest_N[(fewest_N >= start) & (fewest_N < end)], [end])
    if any(steps[-1] > end for steps in all_steps):
        warnings.append(
            f"runs are compared after {end:,} {unit}, which all have reached; later evaluations are"
            " ignored"
        )
    if any(not np.isin(env_steps_N, steps).all() for steps in all_steps):
        warnings.append(f"runs were evaluated at different {unit}; their values are interpolated")
    return env_steps_N


def summarize(comparison: Comparison, threshold: float | None) -> list[dict[str, Any]]:
    """Return a row of summary statistics for each method, some of them with intervals.

    These are the final score, the average over training, the probability of improvement over the
    first method, and the environment steps and minutes until the mean over tasks reaches the
    threshold.

    Args:
        comparison: the methods; the first is the baseline.
        threshold: threshold of the mean over tasks; None for no threshold.
    """
    rows = []
    first = next(iter(comparison.curves))
    first_ST = comparison.curves[first].scores_STN[:, :, -1]
    for label, (scores_STN, minutes_SN) in comparison.curves.items():
        final_ST = scores_STN[:, :, -1]
        # rounded, because the mean of 0.7, 1 and 0.7 is 0.7999999999999999 and reaches 0.8
        mean_SN = np.round(scores_STN.mean(1), 9)
        reached_SN = mean_SN >= (np.inf if threshold is None else threshold)
        reached = {s: int(row.argmax()) for s, row in enumerate(reached_SN) if row.any()}
        steps = [int(comparison.env_steps_N[n]) for n in reached.values()]
        minutes = [] if minutes_SN is None else [minutes_SN[s, n] for s, n in reached.items()]
        rows.append(
            {
                "method": label,
                "seeds": len(scores_STN),
                "final": interquartile_mean(final_ST),
                "final_mean": mean(final_ST),
                "average": interquartile_mean(scores_STN.mean(2)),
                "better_than_first": (
                    None if label == first else probability_of_improvement(final_ST, first_ST)
                ),
                "reached": len(steps),
                "env_steps_to_threshold": float(np.median(steps)) if steps else None,
                "minutes_to_threshold": float(np.median(minutes)) if minutes else None,
                "minutes": None if minutes_SN is None else float(np.median(minutes_SN[:, -1])),
            }
        )
    return rows


def table(
    rows: Sequence[Mapping[str, Any]], threshold: float | None, unit: str = ENV_STEPS
) -> list[list[str]]:
    """Return the rows of ``summarize`` as text, the header first.

    Args:
        rows: rows returned by ``summarize``.
        threshold: threshold passed to ``summarize``.
        unit: unit of the runs' steps.
    """
    lines = []
    for row in rows:
        cells = {
            "method": row["method"],
            "seeds": str(row["seeds"]),
            "at the end": _shown(row["final"]),
            "mean at the end": _shown(row["final_mean"]),
            "over training": _shown(row["average"]),
        }
        if len(rows) > 1:
            cells["P(better than the first)"] = _shown(row["better_than_first"])
        if threshold is not None:
            reached = f"{row['reached']} of {row['seeds']}"
            steps = whole(row["env_steps_to_threshold"])
            cells[f"{unit} to {threshold:g}"] = f"{steps} ({reached})"
            cells[f"minutes to {threshold:g}"] = number(row["minutes_to_threshold"], 1)
        cells["minutes in all"] = number(row["minutes"], 1)
        lines.append(cells)
    return [list(lines[0]), *(list(cells.values()) for cells in lines)]


def task_table(comparison: Comparison) -> list[list[str]]:
    """Return each task's final interquartile mean over seeds, for every method."""
    lines = [["task", *comparison.curves]]
    for task in comparison.tasks:
        bands = comparison.bands[task].values()
        ends = [Estimate(*(None if one is None else one[-1] for one in band)) for band in bands]
        lines.append([task, *map(_shown, ends)])
    return lines


def _shown(estimate: Estimate | None) -> str:
    value, low, high = estimate or Estimate(None)
    return with_interval(value, (low, high))
