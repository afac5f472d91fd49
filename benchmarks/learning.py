r"""Learning curves of several variants of a run, over seeds, with intervals.

``python -m benchmarks.learning`` trains a configuration through the command line,
once for every variant and seed, and compares the curves: the interquartile mean over seeds and
tasks with a 95 % bootstrap interval (Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge
of the Statistical Precipice"), as a table and a figure. A variant is a name and options of ``fit``.
Called again with the same folder, it reads finished runs and resumes interrupted ones from their
last checkpoint. Variants in bf16-mixed are left out on a processor where that is slower.

    python -m benchmarks.learning --config configs/quickstart.yaml --folder runs/learning \
        --variant 32-true --variant bf16-mixed --trainer.precision bf16-mixed
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.measuring import (
    end_on_sigterm,
    environment,
    finish,
    machine,
    parser_of,
    positive,
    say,
    slow_bfloat16,
)
from benchmarks.trial import COMMAND
from mtrl_lightning.callbacks.curves import Curve, read_metrics
from mtrl_lightning.envs.vector import usable_cores
from mtrl_lightning.errors import ConfigurationError

RESAMPLES = 2_000


class Variant(NamedTuple):
    """One line of the comparison."""

    name: str
    options: list[str]


class Curves(NamedTuple):
    """What a variant's runs gave: ``S`` seeds, ``T`` tasks, ``N`` evaluations."""

    env_steps_N: npt.NDArray[np.int64]
    scores_STN: npt.NDArray[np.float64]
    minutes_SN: npt.NDArray[np.float64]
    """Minutes of training until each evaluation, evaluations and checkpoints included."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not trained yet, compare, and print a table or JSON."""
    given, variants = parse(sys.argv[1:] if arguments is None else arguments)
    end_on_sigterm()
    given.folder.mkdir(parents=True, exist_ok=True)
    seeds = range(1, given.seeds + 1)
    variants, left_out = leave_out_slow(variants, given)
    train([(variant, seed) for seed in seeds for variant in variants], given)
    curves = {
        variant.name: read(given.folder, variant.name, seeds, given.metric) for variant in variants
    }
    rows = compare(curves, given.threshold)
    figure = plot(curves, given.metric, given.folder / "learning.png")
    content = {
        "machine": machine(),
        "config": str(given.config),
        "metric": given.metric,
        "seeds": given.seeds,
        "variants": {variant.name: variant.options for variant in variants},
        "left_out": left_out,
        "rows": rows,
        "figure": str(figure),
    }
    (given.folder / "learning.json").write_text(json.dumps(content, indent=1))
    text = "\n\n".join([*left_out, markdown(rows, given), str(figure)])
    finish(content, text, given.json)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Variant]]:
    """Return the options and the variants: after ``--variant NAME`` come its options of ``fit``."""
    parser = parser_of("learning", __doc__)
    parser.add_argument(
        "--config", type=Path, default=Path("configs/quickstart.yaml"), help="(default %(default)s)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/learning"),
        help="of the runs (default %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=positive, default=5, help="runs of each variant (default %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, help="runs at the same time (default %(default)s)"
    )
    parser.add_argument(
        "--metric", default="eval/success", help="of every task (default %(default)s)"
    )
    parser.add_argument(
        "--threshold", type=float, default=0.8, help="of the mean over tasks (default %(default)s)"
    )
    parser.add_argument(
        "--variant", metavar="NAME [OPTION ...]", help="and options of fit; give several, last"
    )
    first = list(arguments).index("--variant") if "--variant" in arguments else len(arguments)
    given = parser.parse_args(arguments[:first])
    variants: list[Variant] = []
    for word in arguments[first:]:
        if word == "--variant":
            variants.append(Variant("", []))
        elif not variants[-1].name:
            variants[-1] = Variant(word, [])
        else:
            variants[-1].options.append(word)
    names = [variant.name for variant in variants]
    if (
        not variants
        or not all(names)
        or len(set(names)) < len(names)
        or any(name.startswith("-") for name in names)
    ):
        parser.error("give each --variant a name of its own, and its options after it")
    return given, variants


def leave_out_slow(
    variants: Sequence[Variant], given: argparse.Namespace
) -> tuple[list[Variant], list[str]]:
    """Leave out the variants in bf16-mixed where it is slower than 32-true.

    Variants whose runs are all finished stay.

    Args:
        variants: all that were asked for.
        given: options of this program.

    Returns:
        The variants to train and compare, and a sentence for each that is left out.

    Raises:
        ConfigurationError: if none is left.
    """
    times = slow_bfloat16("cuda" if torch.cuda.is_available() else "cpu")
    if times is None:
        return list(variants), []
    kept: list[Variant] = []
    left_out: list[str] = []
    for variant in variants:
        in_bfloat16 = any(word.split("=")[-1] == "bf16-mixed" for word in variant.options)
        results = [
            given.folder / f"{variant.name}_{seed}.json" for seed in range(1, given.seeds + 1)
        ]
        if not in_bfloat16 or all(path.exists() for path in results):
            kept.append(variant)
            continue
        left_out.append(
            f"{variant.name} is left out: matrix products take {times.slowdown:.1f} times as long"
            " in bfloat16 as in float32 on this processor"
        )
        say(left_out[-1])
    if not kept:
        raise ConfigurationError(
            f"{'; '.join(left_out)}: give a variant with --trainer.precision 32-true"
        )
    return kept, left_out


def train(wanted: Sequence[tuple[Variant, int]], given: argparse.Namespace) -> None:
    """Make every run that is not finished; none is left running when this ends.

    Raises:
        ConfigurationError: with the end of its output, if a run fails.
    """
    running: set[subprocess.Popen[str]] = set()
    with ThreadPoolExecutor(given.jobs) as pool:
        try:
            tasks = [
                pool.submit(_train_one, variant, seed, given, running) for variant, seed in wanted
            ]
            for task in tasks:
                task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for run in list(running):
                with contextlib.suppress(ProcessLookupError):
                    # it saves a checkpoint, from which the next call resumes
                    os.killpg(run.pid, signal.SIGTERM)
            raise


def _train_one(
    variant: Variant, seed: int, given: argparse.Namespace, running: set[subprocess.Popen[str]]
) -> None:
    name = f"{variant.name}_{seed}"
    finished = given.folder / f"{variant.name}_{seed}.json"
    made_with = {"config": Path(given.config).read_text(), "options": variant.options}
    if finished.exists():
        if json.loads(finished.read_text()) != made_with:
            raise ConfigurationError(
                f"{finished} is of a run with other options: give another --folder or name"
            )
        return
    interrupted = any((given.folder / name).glob("version_*/checkpoints/last.ckpt"))
    say(f"{name}: {'resumed' if interrupted else 'started'}")
    options = [  # the last ones override a configuration file among the variant's
        *variant.options,
        "--root",
        str(given.folder),
        "--name",
        name,
        "--seed_everything",
        str(seed),
    ]
    resuming = ["--ckpt_path", "last"] if interrupted else []
    line = [sys.executable, "-c", COMMAND, "fit", "-c", str(given.config), *options, *resuming]
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // given.jobs))}
    run = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**threads, **environment()},
        start_new_session=True,
    )
    running.add(run)
    printed, _ = run.communicate()
    running.discard(run)
    if run.returncode:
        raise ConfigurationError(f"{name} ended with code {run.returncode}: {printed[-2000:]}")
    finished.write_text(json.dumps(made_with))
    say(f"{name}: finished")


def read(folder: Path, name: str, seeds: Sequence[int], metric: str) -> Curves:
    """Return a variant's curves from the runs' ``metrics.csv``.

    Raises:
        ConfigurationError: if no task has this metric, or the runs were evaluated at different
            steps.
    """
    found = []
    runs = []
    ticks = set()
    for seed in seeds:
        metrics = read_metrics(next((folder / f"{name}_{seed}").glob("version_*")))
        curves = [metrics[key] for key in sorted(metrics) if key.startswith(f"{metric}/")]
        ticks |= {tuple(env_steps) for env_steps, _ in curves}
        found.append([values for _, values in curves])
        runs.append(metrics)
    if len(ticks) != 1 or len({len(curves) for curves in found}) != 1:
        what = "has no values" if not ticks else "was not measured at the same steps in all runs"
        raise ConfigurationError(f"{metric} of {name} {what}: give a --metric such as eval/success")
    env_steps_N = ticks.pop()
    minutes_SN = [minutes_until(env_steps_N, metrics) for metrics in runs]
    return Curves(np.array(env_steps_N), np.array(found), np.array(minutes_SN))


def minutes_until(env_steps_N: Sequence[int], metrics: dict[str, Curve]) -> npt.NDArray[np.float64]:
    """Return the minutes of training until each number of env steps.

    They are summed from the rows' env steps per second, so the time between an interruption and
    the continuation does not count. Nor does a row with a rate of 0, that of a run which was
    interrupted after its last env step, in the updates of an iteration.
    """
    logged, rates = metrics["time/env_steps_per_second"]
    made = np.diff(logged, prepend=0)
    seconds = np.cumsum([n / rate if rate else 0.0 for n, rate in zip(made, rates, strict=True)])
    return np.interp(env_steps_N, [0, *logged], [0, *seconds]) / 60


def interquartile_mean(scores: npt.NDArray) -> float:
    """Return the mean of the middle half of all scores; a score at the cut counts in part."""
    ordered = np.sort(scores, axis=None)
    cut = len(ordered) / 4
    edges = np.arange(len(ordered) + 1)
    weights = np.diff(np.clip(edges, cut, len(ordered) - cut))
    return float(ordered @ weights / weights.sum())


def interval(scores_ST: npt.NDArray, generator: np.random.Generator) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the interquartile mean; resample seeds per task."""
    num_seeds, num_tasks = scores_ST.shape
    drawn = generator.integers(num_seeds, size=(RESAMPLES, num_seeds, num_tasks))
    means = [interquartile_mean(np.take_along_axis(scores_ST, one, axis=0)) for one in drawn]
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def compare(curves: dict[str, Curves], threshold: float) -> list[dict[str, Any]]:
    """Return a row for each variant.

    It has the score at the end, the average over training and its difference from the first
    variant's, and the environment steps and minutes to the threshold.
    """
    rows = []
    first = next(iter(curves.values()))
    for name, (env_steps_N, scores_STN, minutes_SN) in curves.items():
        generator = np.random.default_rng(0)
        final_ST = scores_STN[:, :, -1]
        area_ST = scores_STN.mean(2)
        reached_SN = scores_STN.mean(1) >= threshold
        places = {s: int(row.argmax()) for s, row in enumerate(reached_SN) if row.any()}
        steps = [int(env_steps_N[n]) for n in places.values()]
        minutes = [float(minutes_SN[s, n]) for s, n in places.items()]
        final_interval = interval(final_ST, generator)
        average_interval = interval(area_ST, generator)
        difference = None
        if scores_STN is not first.scores_STN:
            difference = _difference(area_ST, first, generator)
        rows.append(
            {
                "variant": name,
                "final": interquartile_mean(final_ST),
                "final_interval": final_interval,
                "average": interquartile_mean(area_ST),
                "average_interval": average_interval,
                "less_first": difference,
                "reached": len(steps),
                "seeds": len(scores_STN),
                "env_steps_to_threshold": float(np.median(steps)) if steps else None,
                "minutes_to_threshold": float(np.median(minutes)) if minutes else None,
                "minutes": float(np.median(minutes_SN[:, -1])),
                "final_of_seeds": final_ST.mean(1).tolist(),
            }
        )
    return rows


def _difference(area_ST: npt.NDArray, first: Curves, generator: np.random.Generator) -> list[float]:
    """Return the difference of the averages over training, with its 95 % bootstrap interval."""
    areas = area_ST.mean(1), first.scores_STN.mean((1, 2))
    drawn = [generator.choice(area_S, (RESAMPLES, len(area_S))).mean(1) for area_S in areas]
    low, high = np.percentile(drawn[0] - drawn[1], [2.5, 97.5])
    return [float(areas[0].mean() - areas[1].mean()), float(low), float(high)]


def markdown(rows: Sequence[dict[str, Any]], given: argparse.Namespace) -> str:
    """Return the comparison as a Markdown table."""
    header = [
        "variant",
        "seeds",
        "at the end",
        "over training",
        "less the first",
        f"env steps to {given.threshold:g}",
        f"minutes to {given.threshold:g}",
        "minutes in all",
    ]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        cells = [
            f"{row[k]:.2f} [{row[f'{k}_interval'][0]:.2f}, {row[f'{k}_interval'][1]:.2f}]"
            for k in ("final", "average")
        ]
        difference = "-"
        if row["less_first"]:
            difference = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*row["less_first"])
        steps = row["env_steps_to_threshold"]
        median_steps = f"{steps:,.0f}" if steps else "-"
        reached = f"{median_steps} ({row['reached']} of {row['seeds']})"
        minutes = row["minutes_to_threshold"]
        times = ["-" if minutes is None else f"{minutes:.1f}", f"{row['minutes']:.1f}"]
        lines.append([row["variant"], str(row["seeds"]), *cells, difference, reached, *times])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{given.config}, {given.metric}: interquartile mean [95 % bootstrap interval]\n\n{text}"


def plot(curves: dict[str, Curves], metric: str, path: Path) -> Path:
    """Plot all variants, by env steps and by minutes (the mean of the seeds').

    Returns:
        The file's path.
    """
    from matplotlib.figure import Figure  # takes a second to import
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    by_steps, by_minutes = figure.subplots(ncols=2, sharey=True)
    for i, (name, (env_steps_N, scores_STN, minutes_SN)) in enumerate(curves.items()):
        generator = np.random.default_rng(0)
        ticks = range(len(env_steps_N))
        means = [interquartile_mean(scores_STN[:, :, n]) for n in ticks]
        low, high = zip(*(interval(scores_STN[:, :, n], generator) for n in ticks), strict=True)
        style = {"marker": ".", "linestyle": ("-", "--", ":")[i // 10 % 3], "color": f"C{i % 10}"}
        by_steps.plot(env_steps_N, means, label=f"{name} ({len(scores_STN)} seeds)", **style)
        by_steps.fill_between(env_steps_N, low, high, color=style["color"], alpha=0.15, linewidth=0)
        by_minutes.plot(minutes_SN.mean(0), means, **style)
    by_steps.set(xlabel="environment steps, all tasks", ylabel=f"{metric}, interquartile mean")
    by_steps.xaxis.set_major_formatter(EngFormatter(sep=""))
    by_minutes.set(xlabel="minutes of training")
    for axes in (by_steps, by_minutes):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    main()
