"""Train many configurations on this machine: ``mtrl-lightning sweep sweep/learning_rates``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from mtrl_lightning.cli.commands import CommandParser, mistakes_end_the_program
from mtrl_lightning.cli.config_names import find_config
from mtrl_lightning.errors import ConfigurationError

HELP = "Train the configurations of a sweep file of W&B on this machine, and compare them."
DESCRIPTION = (
    f"{HELP} Each trial is a run of its own; a killed sweep continues when the command is given"
    " again. ROOT/NAME gets sweep.db (Optuna's database), sweep.csv, plots and a folder for each"
    " trial. Options after -- are those of fit, for every run."
)
FIT_OPTIONS = "--"
"""Separates the options of ``fit`` from those of ``sweep``."""
SWEEP_FILE = "SWEEP_FILE"


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
    given = list(sys.argv[2:] if args is None else args)
    place = given.index(FIT_OPTIONS) if FIT_OPTIONS in given else len(given)
    options = parser.parse_args(given[:place])
    with mistakes_end_the_program():
        code = sweep(options, tuple(given[place + 1 :]))
    if code:
        sys.exit(code)


def sweep(options: argparse.Namespace, fit_options: tuple[str, ...]) -> int:
    """Check a sweep, run it, and show what it found; return the exit code.

    Args:
        options: of the command line.
        fit_options: options of ``fit`` for every run.

    Raises:
        ConfigurationError: if the sweep cannot be run; with the remedy.
    """
    from mtrl_lightning.sweeps.study import import_optuna
    from mtrl_lightning.sweeps.sweep import StoppedError, SweepOptions, run_sweep
    from mtrl_lightning.sweeps.sweep_file import read_sweep_file
    from mtrl_lightning.sweeps.table import rows_of, text_table, write_table

    given = read_sweep_file(find_config(options.file), fit_options)
    if options.seeds is not None:
        given = given._replace(seeds=tuple(range(1, options.seeds + 1)))
    trials = options.trials or given.run_cap
    if trials is None and given.method != "grid":
        raise ConfigurationError(
            f"{given.path} is a {given.method} search, which has no end: give --trials"
        )
    if not options.dry_run:
        import_optuna()
    from mtrl_lightning.sweeps.check import check_sweep  # imports PyTorch

    checked = check_sweep(given)
    if options.dry_run:
        for values in given.corners:
            print(f"mtrl-lightning {shlex.join(given.arguments(values, given.seeds[0]))}")
        return 0
    for note in given.notes:
        print(f"note: {note}")
    where = SweepOptions(
        root=options.root,
        name=options.name or given.name,
        trials=trials,
        jobs=options.jobs,
        threads=threads_per_run(options.jobs),
        seed=options.draw_seed,
    )
    try:
        study = run_sweep(given, where, checked.logged_every, say=_say)
    except StoppedError as stopped:
        print("Interrupted; its runs are saved. The same command continues the sweep")
        return 128 + stopped.number
    import matplotlib

    from mtrl_lightning.sweeps.plots import write_plots

    matplotlib.use("agg")  # no window, whatever MPLBACKEND says
    rows = rows_of(study, given)
    print(text_table(rows, given))
    print(write_table(rows, given, where.folder))
    for path in write_plots(study, given, where.folder):
        print(path)
    print(f"optuna-dashboard sqlite:///{study.path} shows the trials in a browser")
    return 0


def threads_per_run(jobs: int) -> int:
    """Return the threads of each run: those of ``OMP_NUM_THREADS``, or an equal share of the cores.

    Args:
        jobs: runs at the same time.

    Raises:
        ConfigurationError: if the variable does not begin with a number above 0.
    """
    from mtrl_lightning.envs.vector.vector import usable_cores

    given = os.environ.get("OMP_NUM_THREADS")
    if not given:
        return max(1, usable_cores() // jobs)
    outermost = given.split(",")[0].strip()  # a list has one number per level of nested parallelism
    if not outermost.isdecimal() or int(outermost) < 1:
        raise ConfigurationError(
            f"OMP_NUM_THREADS is {given!r}: give the threads of a run, such as 4, or unset it"
        )
    return int(outermost)


def _say(text: str) -> None:
    print(text, flush=True)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return number
