"""Train many configurations on this machine: ``mtrl-lightning sweep sweep/learning_rates``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrl_lightning.cli.commands import CommandParser, mistakes_end_the_program
from mtrl_lightning.cli.config_names import find_config
from mtrl_lightning.errors import ConfigurationError, Interrupted

if TYPE_CHECKING:
    from mtrl_lightning.sweeps.sweep_file import SweepFile

HELP = "Train the configurations of a sweep file of W&B on this machine, and compare them."
DESCRIPTION = (
    f"{HELP} Each trial is a run of its own; a killed sweep continues when the command is given"
    " again. ROOT/NAME gets sweep.db (Optuna's database), sweep.csv, sweep.md, plots and a folder"
    " for each trial. Options after -- are those of fit, for every run."
)
FIT_OPTIONS = "--"
"""Separates the options of ``fit`` from those of ``sweep``."""
SWEEP_FILE = "SWEEP_FILE"
LOGGED = ("train/", "rollout/", "time/", "fault/", "system/")
"""Beginnings of the names of metrics that runs log beside those of evaluations."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sweep``."""
    parser.add_argument(
        "file",
        metavar=SWEEP_FILE,
        help="a sweep file by name, such as sweep/learning_rates (mtrl-lightning list sweep prints"
        " all), or a YAML file in the format of W&B",
    )
    parser.add_argument(
        "--trials",
        type=_positive,
        metavar="N",
        help="configurations in all, those of an interrupted start included (default: run_cap of"
        " the file; all of a grid)",
    )
    parser.add_argument(
        "--jobs", type=_positive, default=1, metavar="N", help="runs at the same time (default 1)"
    )
    parser.add_argument(
        "--seeds",
        type=_positive,
        metavar="N",
        help="seeds 1 to N of every configuration (default: seed_everything of the file)",
    )
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument(
        "--name", help="the sweep's folder is ROOT/NAME (default: name of the file)"
    )
    parser.add_argument(
        "--draw_seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the random choice of configurations (default 0)",
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="check the sweep file, print commands of runs, and start nothing",
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run ``sweep``; an error of the user ends it with exit code 2, a signal with 128 and more.

    Args:
        args: arguments after ``sweep``; None for those of the process.
    """
    parser = CommandParser(
        "sweep",
        description=DESCRIPTION,
        usage="mtrl-lightning sweep SWEEP_FILE [--trials N] [--jobs N] [OPTION ...]"
        " [-- FIT_OPTION ...]",
    )
    add_arguments(parser)
    words = list(sys.argv[2:] if args is None else args)
    index = words.index(FIT_OPTIONS) if FIT_OPTIONS in words else len(words)
    options = parser.parse_args(words[:index])
    with mistakes_end_the_program():
        _sweep(options, tuple(words[index + 1 :]))


def _sweep(options: argparse.Namespace, fit_options: tuple[str, ...]) -> None:
    """Check a sweep, run it, and show its results.

    Args:
        options: of the command line.
        fit_options: options of ``fit`` for every run.

    Raises:
        ConfigurationError: if the sweep cannot be run; with what to do.
    """
    from mtrl_lightning.sweeps.plots import write_plots
    from mtrl_lightning.sweeps.study import DATABASE
    from mtrl_lightning.sweeps.sweep import SweepOptions, run_sweep
    from mtrl_lightning.sweeps.sweep_file import read_sweep_file
    from mtrl_lightning.sweeps.table import printed_table, rows_of, write_tables

    file = read_sweep_file(find_config(options.file), fit_options)
    if options.seeds is not None:
        file = file._replace(seeds=tuple(range(1, options.seeds + 1)))
    trials = options.trials or file.run_cap
    if trials is None and file.method != "grid":
        raise ConfigurationError(
            f"{file.path} is a {file.method} search, which has no end: give --trials"
        )
    metric_every = check_sweep(file)
    if options.dry_run:
        for values in file.corners:
            print(f"mtrl-lightning {shlex.join(file.arguments(values, file.seeds[0]))}")
        return
    if file.has_target:
        print("note: metric.target ends a sweep of W&B, not this one")
    sweep_options = SweepOptions(
        root=options.root,
        name=options.name or file.name,
        trials=trials,
        jobs=options.jobs,
        threads=threads_per_run(options.jobs),
        seed=options.draw_seed,
    )
    try:
        study = run_sweep(file, sweep_options, metric_every)
    except Interrupted:
        print("Interrupted; its runs are saved. The same command continues the sweep")
        raise
    import matplotlib

    matplotlib.use("agg")  # no window, whatever MPLBACKEND says
    folder = sweep_options.folder
    rows = rows_of(study, file)
    print(printed_table(rows, file))
    for path in (*write_tables(rows, file, folder), *write_plots(study, file, folder)):
        print(path)
    print(f"optuna-dashboard sqlite:///{folder / DATABASE} shows the trials in a browser")


def check_sweep(sweep: SweepFile) -> int:
    """Parse configurations that have every choice, and the ends of every range, of a sweep.

    Args:
        sweep: content of the sweep file.

    Returns:
        Environment steps between two values of the metric.

    Raises:
        ConfigurationError: if an option or a value is not accepted, or no run logs the metric.
    """
    from mtrl_lightning.cli.lightning_cli import build_parser  # imports PyTorch
    from mtrl_lightning.reports.record import is_evaluation

    parser = build_parser()
    arguments = [sweep.arguments(values, sweep.seeds[0]) for values in sweep.corners]
    configs = [_parse(parser, one, sweep) for one in arguments]
    config = configs[0]
    if is_evaluation(sweep.metric):
        names = _evaluated(config)
        if sweep.metric not in names:
            averages = [name for name in names if name.count("/") == 1]
            raise ConfigurationError(
                f"{sweep.path}: metric.name is {sweep.metric!r}, which no evaluation of these tasks"
                f" has: give one of {', '.join(averages)}, or that of a task, such as {names[-1]}"
            )
        return config.evaluation.every
    if not sweep.metric.startswith(LOGGED):
        raise ConfigurationError(
            f"{sweep.path}: metric.name is {sweep.metric!r}, which no run logs: give one of an"
            f" evaluation, such as eval/success, or one that begins with {', '.join(LOGGED)}"
        )
    return config.metrics.every


def _parse(parser: Any, arguments: list[str], sweep: SweepFile) -> Any:
    from jsonargparse import ArgumentError

    from mtrl_lightning.cli.suggestions import suggestions

    options = arguments[1:]  # after the command
    try:
        return parser.parse_args(options)
    except (ArgumentError, ConfigurationError) as error:
        found = suggestions(error, options, parser.option_names())
        tips = "".join(f"\ntip: {one}" for one in found)
        raise ConfigurationError(
            f"the program does not accept a run of {sweep.path}:\n"
            f"  mtrl-lightning {shlex.join(arguments)}\n{error}{tips}"
        ) from error


def _evaluated(config: Any) -> list[str]:
    """Return the names of the metrics of a configuration's evaluations."""
    from jsonargparse import ArgumentParser

    from mtrl_lightning.envs import Benchmark
    from mtrl_lightning.rollout.evaluator import metric_names

    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Benchmark, "benchmark")
    parsed = parser.parse_object({"benchmark": config.data.benchmark.as_dict()})
    return metric_names(parser.instantiate_classes(parsed).benchmark)


def threads_per_run(jobs: int) -> int:
    """Return the threads of each run: those of ``OMP_NUM_THREADS``, or an equal share of the cores.

    Args:
        jobs: runs at the same time.

    Raises:
        ConfigurationError: if the variable does not begin with a number above 0.
    """
    from mtrl_lightning.envs.vector.vector import usable_cores

    variable = os.environ.get("OMP_NUM_THREADS")
    if not variable:
        return max(1, usable_cores() // jobs)
    outermost = variable.split(",")[0].strip()  # one number per level of nested parallelism
    if not outermost.isdecimal() or int(outermost) < 1:
        raise ConfigurationError(
            f"OMP_NUM_THREADS is {variable!r}: give the threads of a run, such as 4, or unset it"
        )
    return int(outermost)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return number
