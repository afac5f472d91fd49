"""Methods compared: curves over seeds, a row of numbers for each method, a Markdown table, a CSV.

Shapes: ``S`` seeds, ``T`` tasks, ``N`` evaluations.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.formats import (
    UNKNOWN,
    number,
    signed_with_interval,
    whole,
    with_interval,
)
from mtrl_lightning.reports.methods import Method, group
from mtrl_lightning.reports.metrics_file import minutes_until
from mtrl_lightning.reports.record import (
    RunRecord,
    common_metric,
    find_runs,
    is_bounded,
    is_metrics_file,
    read_metrics_file,
    read_run,
)
from mtrl_lightning.reports.statistics import (
    curve_intervals,
    difference_of_means,
    interquartile_mean,
    interval,
    mean_interval,
    performance_profile,
    probability_interval,
    probability_of_improvement,
)

MIN_SEEDS = 2
"""Seeds below which there is nothing to resample."""
FEW_SEEDS = 3
"""Seeds below which an interval is much too narrow."""
THRESHOLD = 0.8
"""Of the mean over tasks, for metrics between 0 and 1."""
NUM_PROFILE_POINTS = 51


class Curves(NamedTuple):
    """What a method's runs gave: ``S`` seeds, ``T`` tasks, ``N`` evaluations."""

    env_steps_N: npt.NDArray[np.int64]
    scores_STN: npt.NDArray[np.float64]
    minutes_SN: npt.NDArray[np.float64] | None
    """Minutes of training until each evaluation, evaluations and checkpoints included."""


class Comparison(NamedTuple):
    """Methods with their curves on the same tasks, up to the same number of env steps."""

    metric: str
    tasks: tuple[str, ...]
    methods: list[Method]
    curves: dict[str, Curves]
    """By the method's label."""
    has_intervals: bool
    warnings: list[str]
    """What a reader of the result has to know."""

    @property
    def end(self) -> int:
        """Environment steps at which methods are compared: the most that all have made."""
        return int(next(iter(self.curves.values())).env_steps_N[-1])


def compare_runs(
    given: Sequence[str],
    metric: str | None = None,
    across_protocols: bool = False,
    intervals: bool = True,
) -> Comparison:
    """Read runs, group them into methods, and align their evaluations.

    Args:
        given: folders of runs, folders that contain some, or copies of a ``metrics.csv``;
            ``LABEL=FOLDER`` names the method of all of its runs.
        metric: of every task, such as ``eval/success``; None for the first of success, score and
            return that all runs have.
        across_protocols: compare runs of different protocols.
        intervals: whether there are intervals, which need two seeds of each method: a warning
            says where one has a single seed.

    Raises:
        ConfigurationError: if a folder is no run, a run has no evaluations, or protocols differ.
    """
    warnings: list[str] = []
    labelled = _read(given, warnings)
    records = [record for _, record in labelled]
    differences = protocol_differences(records)
    if differences and not across_protocols:
        raise ConfigurationError(
            "the runs are of different protocols, so that their numbers cannot be compared:"
            f" {'; '.join(differences)}. Leave some out, or compare them all the same with"
            " --across_protocols"
        )
    warnings[:0] = [f"RUNS OF DIFFERENT PROTOCOLS ARE COMPARED: {text}" for text in differences]
    methods = group(labelled)
    chosen = metric or common_metric(records)
    if chosen is None:
        raise ConfigurationError(
            "the runs have no metric of evaluations in common:"
            f" {'; '.join(f'{run.folder} has {_listed(run.evaluated())}' for run in records)}"
        )
    for run in records:
        if not run.tasks_of(chosen):
            raise ConfigurationError(
                f"{run.folder} has no {chosen} of its tasks: give a --metric among"
                f" {_listed(run.evaluated())}"
            )
    has_intervals = intervals and _have_intervals(methods, warnings)
    tasks = _shared_tasks(records, chosen)
    curves = {m.label: curves_of(m.runs, chosen, tasks, warnings, m.label) for m in methods}
    return Comparison(
        chosen, tasks, methods, _until_common_end(curves, warnings), has_intervals, warnings
    )


def _read(given: Sequence[str], warnings: list[str]) -> list[tuple[str | None, RunRecord]]:
    """Read the runs that are given, each once, with the label that is given before ``=``."""
    labelled: list[tuple[str | None, RunRecord]] = []
    seen: set[Path] = set()
    for word in given:
        label, _, rest = word.partition("=")
        has_label = bool(rest) and not Path(word).exists()
        path = Path(rest if has_label else word)
        num_usable = 0
        read = read_metrics_file if is_metrics_file(path) else read_run
        for folder in [path] if is_metrics_file(path) else find_runs(path):
            is_known = folder.resolve() in seen
            run = None if is_known else read(folder)
            if run is not None and not run.evaluated():
                warnings.append(f"{folder} is left out: it has no evaluations")
                continue
            num_usable += 1
            if run is not None:
                seen.add(folder.resolve())
                labelled.append((label if has_label else None, run))
        if not num_usable:
            raise ConfigurationError(_without_evaluations(path))
    return labelled


def _without_evaluations(path: Path) -> str:
    return (
        f"{path} has no evaluations in its metrics: a run is evaluated every evaluation.every env"
        " steps and at its end. Wait for the first evaluation, or lower evaluation.every"
    )


def protocol_differences(records: Sequence[RunRecord]) -> list[str]:
    """Return in what the protocols of runs differ: a sentence for each part that does.

    A run whose protocol is not recorded is compared by its tasks alone.
    """
    recorded = [record for record in records if record.protocol]
    keys = dict.fromkeys(key for record in recorded for key in record.protocol)
    found = [(key, [(r.folder, _plain(r.protocol.get(key))) for r in recorded]) for key in keys]
    episodes = [
        (r.folder, r.section("evaluation").get("num_episodes"))
        for r in records
        if r.section("evaluation")
    ]
    found.append(("test episodes per task", episodes))
    tasks = [(r.folder, _listed(_all_tasks(r))) for r in records]
    found.append(("evaluated tasks", tasks))
    return [
        f"{key} is {values[0][1]} in {values[0][0]} and {other} in {folder}"
        for key, values in found
        for folder, other in [next(((f, v) for f, v in values if v != values[0][1]), (None, None))]
        if folder is not None
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _all_tasks(run: RunRecord) -> list[str]:
    return sorted({task for metric in run.evaluated() for task in run.tasks_of(metric)})


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def _have_intervals(methods: Sequence[Method], warnings: list[str]) -> bool:
    """Return whether every method has the seeds that an interval needs; warn of few ones."""
    single = [method.label for method in methods if len(method.runs) < MIN_SEEDS]
    if single:
        warnings.append(
            f"there are no intervals: they need at least {MIN_SEEDS} seeds per method, and one"
            f" seed each has {_listed(single)}. Train more with another --seed_everything"
        )
        return False
    few = [method.label for method in methods if len(method.runs) < FEW_SEEDS]
    if few:
        warnings.append(
            f"intervals of fewer than {FEW_SEEDS} seeds are much too narrow: {_listed(few)}"
        )
    return True


def _shared_tasks(records: Sequence[RunRecord], metric: str) -> tuple[str, ...]:
    tasks = records[0].tasks_of(metric)
    shared = tuple(task for task in tasks if all(task in r.tasks_of(metric) for r in records))
    if not shared:
        raise ConfigurationError(
            f"the runs have no task in common of which {metric} was measured: leave some out"
        )
    return shared


def curves_of(
    runs: Sequence[RunRecord],
    metric: str,
    tasks: Sequence[str],
    warnings: list[str] | None = None,
    label: str = "",
) -> Curves:
    """Return the curves of runs with different seeds, at the same env steps.

    Runs that were evaluated at different env steps are interpolated at those of the run with the
    fewest evaluations, as far as all of them have got.

    Args:
        runs: one for each seed.
        metric: such as ``eval/success``.
        tasks: whose values are taken.
        warnings: get a sentence if values are interpolated.
        label: of the method, for the sentence.
    """
    # that of the average is not taken: it may be over other tasks
    all_steps = [np.array(run.curves[f"{metric}/{tasks[0]}"][0]) for run in runs]
    first = max(int(steps[0]) for steps in all_steps)
    last = min(int(steps[-1]) for steps in all_steps)
    env_steps_N = min(all_steps, key=len)
    env_steps_N = env_steps_N[(env_steps_N >= first) & (env_steps_N <= last)]
    if not len(env_steps_N):
        raise ConfigurationError(
            f"the runs of {label or runs[0].folder} were evaluated at different env steps, and have"
            f" none in common: {', '.join(str(run.folder) for run in runs)}. Leave some out"
        )
    if warnings is not None and any(not np.isin(env_steps_N, steps).all() for steps in all_steps):
        warnings.append(
            f"{label}: its runs were evaluated at different env steps; values in between are"
            " interpolated"
        )
    scores = []
    for run in runs:
        columns = [run.curves[f"{metric}/{task}"] for task in tasks]
        scores.append([np.interp(env_steps_N, steps, values) for steps, values in columns])
    minutes = [minutes_until(env_steps_N, run.curves) for run in runs]
    known = [one for one in minutes if one is not None]
    minutes_SN = np.array(known) if len(known) == len(runs) else None
    return Curves(env_steps_N, np.array(scores), minutes_SN)


def _until_common_end(curves: Mapping[str, Curves], warnings: list[str]) -> dict[str, Curves]:
    """Cut all curves at the last env steps that every method has; interpolate a value there."""
    ends = {label: int(one.env_steps_N[-1]) for label, one in curves.items()}
    end = min(ends.values())
    longer = [f"{label} {steps:,}" for label, steps in ends.items() if steps > end]
    if longer:
        warnings.append(
            f"methods are compared after {end:,} env steps, as far as all of them have got; later"
            f" evaluations are left out ({'; '.join(longer)})"
        )
    cut = {label: _with_end(one, end, label) for label, one in curves.items()}
    first, *others = [one.env_steps_N for one in cut.values()]
    if not all(np.array_equal(first, other) for other in others):
        counts = [
            f"{label} {len(one.env_steps_N)} times from {one.env_steps_N[0]:,} on"
            for label, one in cut.items()
        ]
        warnings.append(
            "methods were evaluated at different env steps, so that their averages over training"
            f" are over different evaluations: {'; '.join(counts)}"
        )
    return cut


def _with_end(curves: Curves, end: int, label: str) -> Curves:
    """Return the curves up to a number of env steps, with interpolated values there."""
    env_steps_N, scores_STN, minutes_SN = curves
    if env_steps_N[0] > end:
        raise ConfigurationError(
            f"{label} was first evaluated after {env_steps_N[0]:,} env steps, and another"
            f" method has made {end:,} only: they have no env steps in common"
        )
    kept_N = np.append(env_steps_N[env_steps_N < end], end)

    def at_kept(values_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.interp(kept_N, env_steps_N, values_N)

    return Curves(
        kept_N,
        np.apply_along_axis(at_kept, -1, scores_STN),
        None if minutes_SN is None else np.apply_along_axis(at_kept, -1, minutes_SN),
    )


def summarize(
    curves: Mapping[str, Curves], threshold: float | None, has_intervals: bool = True
) -> list[dict[str, Any]]:
    """Return a row of numbers for each method.

    It has the score at the end, the average over training and its difference from the first
    method's, the probability that a run is better than one of the first method, and the
    environment steps and minutes until the mean over tasks reaches the threshold.

    Args:
        curves: of each method, by its label; what they are compared with comes first.
        threshold: of the mean over tasks; None for none.
        has_intervals: whether intervals are computed; without, they are None.
    """
    rows = []
    first = next(iter(curves.values()))
    for name, (env_steps_N, scores_STN, minutes_SN) in curves.items():
        generator = np.random.default_rng(0)
        final_ST = scores_STN[:, :, -1]
        area_ST = scores_STN.mean(2)
        reached: dict[int, int] = {}
        if threshold is not None:
            reached_SN = reaches(scores_STN.mean(1), threshold)
            reached = {s: int(row.argmax()) for s, row in enumerate(reached_SN) if row.any()}
        steps = [int(env_steps_N[n]) for n in reached.values()]
        minutes: list[float] = []
        if minutes_SN is not None:
            minutes = [float(minutes_SN[s, n]) for s, n in reached.items()]
        final_interval = interval(final_ST, generator) if has_intervals else None
        average_interval = interval(area_ST, generator) if has_intervals else None
        difference = None
        probability = None
        if scores_STN is not first.scores_STN:
            value, bounds = difference_of_means(
                area_ST.mean(1), first.scores_STN.mean((1, 2)), generator
            )
            difference = [value, *(bounds if has_intervals else (None, None))]
            others_ST = first.scores_STN[:, :, -1]
            better = probability_of_improvement(final_ST, others_ST)
            between: Sequence[float | None] = (None, None)
            if has_intervals:
                between = probability_interval(final_ST, others_ST, generator)
            probability = [better, *between]
        mean_bounds = mean_interval(final_ST, generator) if has_intervals else None
        rows.append(
            {
                "method": name,
                "final": interquartile_mean(final_ST),
                "final_interval": final_interval,
                "final_mean": float(final_ST.mean()),
                "final_mean_interval": mean_bounds,
                "average": interquartile_mean(area_ST),
                "average_interval": average_interval,
                "less_first": difference,
                "better_than_first": probability,
                "reached": len(steps),
                "seeds": len(scores_STN),
                "env_steps_to_threshold": float(np.median(steps)) if steps else None,
                "minutes_to_threshold": float(np.median(minutes)) if minutes else None,
                "minutes": None if minutes_SN is None else float(np.median(minutes_SN[:, -1])),
                "final_of_seeds": final_ST.mean(1).tolist(),
            }
        )
    return rows


def reaches(mean: npt.ArrayLike, threshold: float) -> npt.NDArray[np.bool_]:
    """Return whether means are at least a threshold.

    The error of the last digits is left out: the mean of 0.7, 1 and 0.7 is 0.7999999999999999, and
    reaches 0.8.
    """
    return np.round(np.asarray(mean, np.float64), 9) >= threshold


def default_threshold(metric: str) -> float | None:
    """Return the threshold of a metric between 0 and 1; None for others."""
    return THRESHOLD if is_bounded(metric) else None


def table(rows: Sequence[Mapping[str, Any]], threshold: float | None) -> list[list[str]]:
    """Return the rows of ``summarize`` as texts, the header first."""
    lines = [
        [
            "method",
            "seeds",
            "at the end",
            "mean at the end",
            "over training",
            "less the first",
            "P(better than the first)",
        ]
    ]
    if threshold is not None:
        lines[0] += [f"env steps to {threshold:g}", f"minutes to {threshold:g}"]
    lines[0].append("minutes in all")
    for row in rows:
        better = row["better_than_first"]
        cells = [
            row["method"],
            str(row["seeds"]),
            with_interval(row["final"], row["final_interval"]),
            with_interval(row["final_mean"], row["final_mean_interval"]),
            with_interval(row["average"], row["average_interval"]),
            signed_with_interval(row["less_first"]),
            UNKNOWN if better is None else with_interval(better[0], better[1:]),
        ]
        if threshold is not None:
            steps = row["env_steps_to_threshold"]
            cells.append(f"{whole(steps)} ({row['reached']} of {row['seeds']})")
            cells.append(number(row["minutes_to_threshold"], decimals=1))
        lines.append([*cells, number(row["minutes"], decimals=1)])
    return lines


def task_table(comparison: Comparison) -> list[list[str]]:
    """Return each task's mean over seeds at the end, with its interval, for every method."""
    lines = [["task", *comparison.curves]]
    finals = {label: one.scores_STN[:, :, -1] for label, one in comparison.curves.items()}
    for place, task in enumerate(comparison.tasks):
        cells = []
        for final_ST in finals.values():
            own_S1 = final_ST[:, place : place + 1]
            bounds = None
            if comparison.has_intervals:
                bounds = mean_interval(own_S1, np.random.default_rng(0))
            cells.append(with_interval(float(own_S1.mean()), bounds))
        lines.append([task, *cells])
    return lines


class Band(NamedTuple):
    """A curve with its interval, one value for each evaluation."""

    value_N: npt.NDArray[np.float64]
    bounds_N2: npt.NDArray[np.float64] | None
    """None if there are no intervals."""


def band(curves: Curves, has_intervals: bool = True, task: int | None = None) -> Band:
    """Return the interquartile mean over seeds and tasks, or over seeds of one task.

    Args:
        curves: of a method.
        has_intervals: whether there is an interval.
        task: place of the only task; None for all.
    """
    scores_STN = curves.scores_STN if task is None else curves.scores_STN[:, task : task + 1]
    places = range(scores_STN.shape[2])
    value_N = np.array([interquartile_mean(scores_STN[:, :, n]) for n in places])
    if not has_intervals:
        return Band(value_N, None)
    return Band(value_N, curve_intervals(scores_STN, np.random.default_rng(0)))


class Bands(NamedTuple):
    """Everything that is drawn of a comparison, computed once."""

    average: dict[str, Band]
    """By the method's label."""
    tasks: dict[str, dict[str, Band]]
    """By the task's name and the method's label."""
    thresholds_K: npt.NDArray[np.float64]
    profiles: dict[str, Band]
    """Share of runs and tasks above each threshold at the end, by the method's label."""


def bands_of(comparison: Comparison) -> Bands:
    """Compute what is drawn."""
    curves = comparison.curves
    has_intervals = comparison.has_intervals
    finals = {label: one.scores_STN[:, :, -1] for label, one in curves.items()}
    low = min(0.0, *(float(final_ST.min()) for final_ST in finals.values()))
    high = max(float(final_ST.max()) for final_ST in finals.values())
    high = 1.0 if is_bounded(comparison.metric) else high
    thresholds_K = np.linspace(low, high, NUM_PROFILE_POINTS)
    profiles = {}
    for label, final_ST in finals.items():
        generator = np.random.default_rng(0) if has_intervals else None
        share_K, bounds_K2 = performance_profile(final_ST, thresholds_K, generator)
        profiles[label] = Band(share_K, bounds_K2 if has_intervals else None)
    return Bands(
        {label: band(one, has_intervals) for label, one in curves.items()},
        {
            task: {label: band(one, has_intervals, place) for label, one in curves.items()}
            for place, task in enumerate(comparison.tasks)
        },
        thresholds_K,
        profiles,
    )


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of ``summarize`` as CSV; an interval has two columns, ``_low`` and ``_high``.

    What is not known is empty.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    plain = [dict(_columns(row)) for row in rows]
    writer.writerow(list(plain[0]))
    writer.writerows(["" if value is None else value for value in row.values()] for row in plain)
    return text.getvalue()


def _columns(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name == "final_of_seeds":
            yield name, " ".join(f"{score:g}" for score in value)
        elif name.endswith("_interval"):
            shared = name.removesuffix("_interval")
            yield from zip((f"{shared}_low", f"{shared}_high"), value or (None, None), strict=True)
        elif name in ("less_first", "better_than_first"):
            names = (name, f"{name}_low", f"{name}_high")
            yield from zip(names, value or (None, None, None), strict=True)
        else:
            yield name, value


def curves_csv(comparison: Comparison, bands: Bands) -> str:
    """Return the curves as CSV: a row for each method, task and evaluation.

    The task ``average`` is the interquartile mean over seeds and tasks.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["method", "task", "env_steps", "minutes", "value", "low", "high", "seeds"])
    for label, curves in comparison.curves.items():
        minutes_N = None if curves.minutes_SN is None else curves.minutes_SN.mean(0)
        parts = {"average": bands.average, **bands.tasks}
        for task, of_methods in parts.items():
            value_N, bounds_N2 = of_methods[label]
            for n, env_steps in enumerate(curves.env_steps_N.tolist()):
                bounds = ["", ""] if bounds_N2 is None else bounds_N2[n].tolist()
                minutes = "" if minutes_N is None else f"{minutes_N[n]:.4g}"
                row = [label, task, env_steps, minutes, float(value_N[n]), *bounds]
                writer.writerow([*row, len(curves.scores_STN)])
    return text.getvalue()
