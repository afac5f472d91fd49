r"""Learning curves of several variants of a run, over seeds, with intervals.

``python -m benchmarks.learning`` trains a configuration through the command line,
once for every variant and seed, and compares the curves: the interquartile mean over seeds and
tasks with a 95 % bootstrap interval (Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge
of the Statistical Precipice"), as a table and a figure. A variant is a name and options of ``fit``.
Called again with the same folder, it reads finished runs and resumes interrupted ones from their
last checkpoint; while one call trains in a folder, a second one is refused. When a run fails, the
others are made all the same. Variants in bf16-mixed are left out on a processor where that is
slower.

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

import torch

from benchmarks.measuring import (
    end_on_sigterm,
    environment,
    finish,
    machine,
    parser_of,
    positive,
    refusing,
    say,
    slow_bfloat16,
)
from benchmarks.trial import COMMAND
from mtrl_lightning.envs.vector.vector import usable_cores
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.formats import markdown
from mtrl_lightning.reports.comparison import (
    Comparison,
    Curves,
    bands_of,
    curves_of,
    summarize,
    table,
)
from mtrl_lightning.reports.comparison_plot import plot_comparison
from mtrl_lightning.reports.methods import Method
from mtrl_lightning.reports.record import read_run
from mtrl_lightning.runs import run_lock


class Variant(NamedTuple):
    """One line of the comparison."""

    name: str
    options: list[str]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    given, variants = parse(sys.argv[1:] if arguments is None else arguments)
    end_on_sigterm()
    with refusing(build_parser()):
        compare(given, variants)


def compare(given: argparse.Namespace, variants: list[Variant]) -> None:
    """Train what is not trained yet, compare, and print a table or JSON.

    Args:
        given: options of this program.
        variants: what to compare.

    Raises:
        ConfigurationError: if all variants are left out, if another call trains in the folder, if
            runs there have other options, if runs fail, or if no task has the metric.
    """
    given.folder.mkdir(parents=True, exist_ok=True)
    seeds = range(1, given.seeds + 1)
    variants, left_out = leave_out_slow(variants, given)
    with run_lock(given.folder):
        train([(variant, seed) for seed in seeds for variant in variants], given)
    curves = {
        variant.name: read(given.folder, variant.name, seeds, given.metric) for variant in variants
    }
    rows = summarize(curves, given.threshold)
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
    title = f"{given.config}, {given.metric}: interquartile mean [95 % bootstrap interval]"
    lines = markdown(table(rows, given.threshold))
    text = "\n\n".join([*left_out, title, lines, str(figure)])
    finish(content, text, given.json)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of what comes before the variants."""
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
    return parser


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Variant]]:
    """Return the options and the variants: after ``--variant NAME`` come its options of ``fit``."""
    parser = build_parser()
    first = list(arguments).index("--variant") if "--variant" in arguments else len(arguments)
    given = parser.parse_args(arguments[:first])
    if not given.config.is_file():
        parser.error(f"{given.config} is not there: give --config the path of a file")
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
        results = [_file_of(variant, seed, given) for seed in range(1, given.seeds + 1)]
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
        ConfigurationError: at once, if a finished run has other options; when all others are made,
            if a run fails. The end of its output has been printed by then.
    """
    missing = [one for one in wanted if not _is_finished(*one, given)]
    running: set[subprocess.Popen[str]] = set()
    with ThreadPoolExecutor(given.jobs) as pool:
        try:
            tasks = [
                pool.submit(_train_one, variant, seed, given, running) for variant, seed in missing
            ]
            failed = [
                _name_of(*one)
                for one, task in zip(missing, tasks, strict=True)
                if not task.result()
            ]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            ended = list(running)
            running.clear()
            for run in ended:
                with contextlib.suppress(ProcessLookupError):
                    # it saves a checkpoint, from which the next call resumes
                    os.killpg(run.pid, signal.SIGTERM)
            raise
    if failed:
        raise ConfigurationError(
            f"{', '.join(failed)} failed, see above; {len(wanted) - len(failed)} of {len(wanted)}"
            " runs are finished: the same call tries the others again"
        )


def _name_of(variant: Variant, seed: int) -> str:
    return f"{variant.name}_{seed}"


def _file_of(variant: Variant, seed: int, given: argparse.Namespace) -> Path:
    """Return the file that is written when a run is finished."""
    return given.folder / f"{_name_of(variant, seed)}.json"


def _made_with(variant: Variant, given: argparse.Namespace) -> dict[str, Any]:
    """Return what the file of a finished run holds."""
    return {"config": given.config.read_text(), "options": variant.options}


def _is_finished(variant: Variant, seed: int, given: argparse.Namespace) -> bool:
    """Return whether a run is finished.

    Raises:
        ConfigurationError: if it was made with other options.
    """
    file = _file_of(variant, seed, given)
    if not file.exists():
        return False
    if json.loads(file.read_text()) != _made_with(variant, given):
        raise ConfigurationError(
            f"{file} is of a run with other options: give another --folder or name"
        )
    return True


def _train_one(
    variant: Variant, seed: int, given: argparse.Namespace, running: set[subprocess.Popen[str]]
) -> bool:
    """Make or resume a run; return whether it did not fail."""
    name = _name_of(variant, seed)
    made_with = json.dumps(_made_with(variant, given))
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
    line = [sys.executable, *COMMAND, "fit", "-c", str(given.config), *options, *resuming]
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
    if run not in running:  # it was ended together with this program
        return True
    running.discard(run)
    if run.returncode:
        say(f"{name} ended with code {run.returncode}: {printed[-2000:]}")
        return False
    _file_of(variant, seed, given).write_text(made_with)
    say(f"{name}: finished")
    return True


def read(folder: Path, name: str, seeds: Sequence[int], metric: str) -> Curves:
    """Return a variant's curves from the runs' ``metrics.csv``.

    Raises:
        ConfigurationError: if no task has this metric.
    """
    runs = [read_run(next((folder / f"{name}_{seed}").glob("version_*"))) for seed in seeds]
    tasks = runs[0].tasks_of(metric)
    if not tasks:
        raise ConfigurationError(
            f"{metric} of {name} has no values: give a --metric such as eval/success"
        )
    return curves_of(runs, metric, tasks)


def plot(curves: dict[str, Curves], metric: str, path: Path) -> Path:
    """Plot all variants on average, and return the file's path."""
    methods = [Method(name, [], {}) for name in curves]
    comparison = Comparison(metric, ("average",), methods, curves, True, [])
    return plot_comparison(comparison, bands_of(comparison), path, by_task=False)


if __name__ == "__main__":
    main()
