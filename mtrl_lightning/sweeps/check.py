"""Whether the program accepts the runs of a sweep, found out before any of them starts."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

from jsonargparse import ArgumentError, ArgumentParser

from mtrl_lightning.cli.lightning_cli import build_parser
from mtrl_lightning.cli.suggestions import suggestions
from mtrl_lightning.envs import Benchmark
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports.record import is_evaluation
from mtrl_lightning.rollout.evaluator import metric_names
from mtrl_lightning.sweeps.sweep_file import SweepFile

LOGGED = ("train/", "rollout/", "time/", "fault/", "system/")
"""Beginnings of the names of what runs log beside evaluations."""


class Checked(NamedTuple):
    """What the configurations of a sweep have in common."""

    logged_every: int
    """Environment steps between two values of the sweep's metric."""


def check_sweep(sweep: SweepFile) -> Checked:
    """Parse configurations that have every choice, and the ends of every range, of a sweep.

    Args:
        sweep: what the sweep file says.

    Raises:
        ConfigurationError: if an option or a value is not accepted, or no evaluation has the
            metric; with the command.
    """
    parser = build_parser()
    seed = sweep.seeds[0]
    parsed = [_parse(parser, sweep.arguments(values, seed), sweep) for values in sweep.corners]
    config = parsed[0].fit
    if is_evaluation(sweep.metric):
        _check_metric(config, sweep)
    elif not sweep.metric.startswith(LOGGED):
        raise ConfigurationError(
            f"{sweep.path}: metric.name is {sweep.metric!r}, which no run logs: give one of an"
            f" evaluation, such as eval/success, or one that begins with {', '.join(LOGGED)}"
        )
    section = config.evaluation if is_evaluation(sweep.metric) else config.metrics
    return Checked(section.every)


def _parse(parser: Any, arguments: list[str], sweep: SweepFile) -> Any:
    try:
        return parser.parse_args(arguments)
    except (ArgumentError, ConfigurationError) as error:
        found = suggestions(str(error), parser._subcommands_action._name_parser_map.values())
        tips = "".join(f"\ntip: {one}" for one in found)
        raise ConfigurationError(
            f"the program does not accept a run of {sweep.path}:\n"
            f"  mtrl-lightning {shlex.join(arguments)}\n{error}{tips}"
        ) from error


def _check_metric(config: Any, sweep: SweepFile) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Benchmark, "benchmark")
    given = parser.parse_object({"benchmark": config.data.benchmark.as_dict()})
    known = metric_names(parser.instantiate_classes(given).benchmark)
    if sweep.metric not in known:
        averages = [name for name in known if name.count("/") == 1]
        raise ConfigurationError(
            f"{sweep.path}: metric.name is {sweep.metric!r}, which no evaluation of these tasks"
            f" has: give one of {', '.join(averages)}, or that of a task, such as {known[-1]}"
        )
