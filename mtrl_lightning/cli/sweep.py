"""Train many configurations on this machine: ``mtrl-lightning sweep sweep/learning_rates``."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from mtrl_lightning.checks import at_least
from mtrl_lightning.cli.commands import CommandParser
from mtrl_lightning.cli.config_names import find_config
from mtrl_lightning.cli.play import benchmark_of
from mtrl_lightning.cores import usable_cores
from mtrl_lightning.errors import ConfigurationError, Interrupted, name_hint
from mtrl_lightning.runs import check_name

if TYPE_CHECKING:
    from mtrl_lightning.sweeps.sweep_file import SweepFile

HELP = "Train the configurations of a sweep file of W&B on this machine, and compare them."
DESCRIPTION = (
    f"{HELP} Each trial is a run of its own; a killed sweep continues when the command is given"
    " again. ROOT/NAME gets sweep.db (Optuna's database), sweep.md, plots and a folder for each"
    " trial. Options after -- are those of fit, for every run."
)
USAGE = "mtrl-lightning sweep SWEEP_FILE [--trials N] [--jobs N] [OPTION ...] [-- FIT_OPTION ...]"


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of ``sweep``."""
    parser.usage = USAGE
    parser.takes_fit_options = True
    parser.add_argument(
        "file",
        metavar="SWEEP_FILE",
        help="a sweep file by name, such as sweep/learning_rates (mtrl-lightning list sweep prints"
        " all), or a YAML file in the format of W&B",
    )
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="runs in all, those of an interrupted start included (default: run_cap of the file;"
        " all of a grid)",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at the same time (default 1)"
    )
    parser.add_argument("--root", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument(
        "--name", help="the sweep's folder is ROOT/NAME (default: name of the file)"
    )
    parser.add_argument(
        "--dry_run",
        action="store_true",
        help="check the sweep file, print commands of runs, and start nothing",
    )


def run(options: argparse.Namespace) -> None:
    """Check a sweep, run it, and show its results.

    Raises:
        ConfigurationError: if the sweep cannot be run; with what to do.
    """
    from mtrl_lightning.sweeps.results import PLOTS, write_plots, write_table
    from mtrl_lightning.sweeps.sweep import DATABASE, run_sweep
    from mtrl_lightning.sweeps.sweep_file import read_sweep_file

    at_least(1, prefix="--", trials=options.trials, jobs=options.jobs)
    sweep = read_sweep_file(find_config(options.file), options.fit_options)
    name = options.name or sweep.name
    check_name(name)
    trials = options.trials or sweep.run_cap
    if trials is None and sweep.method != "grid":
        raise ConfigurationError(
            f"{sweep.path} is a {sweep.method} search, which has no end: give --trials"
        )
    check_sweep(sweep)
    if options.dry_run:
        for values in sweep.corners:
            print(f"mtrl-lightning {shlex.join(sweep.arguments(values))}")
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // options.jobs)))
    folder = options.root / name
    try:
        study = run_sweep(sweep, folder, trials=trials, jobs=options.jobs)
    except Interrupted:
        print("Interrupted; its runs are saved. The same command continues the sweep")
        raise
    print(write_table(study, sweep, folder))
    if any(one.state.name == "COMPLETE" for one in study.trials):
        write_plots(study, sweep.metric, folder / PLOTS)
        print(f"Plots are in {folder / PLOTS}")
    print(f"optuna-dashboard sqlite:///{folder / DATABASE} shows the runs in a browser")


def check_sweep(sweep: SweepFile) -> None:
    """Parse configurations that have every choice, and the ends of every range, of a sweep.

    Raises:
        ConfigurationError: if an option or a value is not accepted, or no evaluation has the
            metric.
    """
    from jsonargparse import ArgumentError

    from mtrl_lightning.cli.lightning_cli import build_parser  # imports PyTorch
    from mtrl_lightning.rollout.evaluator import metric_names

    parser = build_parser()
    for values in sweep.corners:
        arguments = sweep.arguments(values)
        try:
            config = parser.parse_with_tips(arguments[1:])
        except (ArgumentError, ConfigurationError) as error:
            raise ConfigurationError(
                f"the program does not accept a run of {sweep.path}:\n"
                f"  mtrl-lightning {shlex.join(arguments)}\n{error}"
            ) from error
    names = metric_names(benchmark_of(config.as_dict()))
    if sweep.metric not in names:
        raise ConfigurationError(
            f"{sweep.path}: metric.name is {sweep.metric!r}, which no evaluation of these tasks"
            f" has: {name_hint(sweep.metric, names)}"
        )
