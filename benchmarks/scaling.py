"""What several ranks gain and cost: updates, gradient methods, whole runs, exchanges.

``python -m benchmarks.scaling`` measures ranks on the cores at hand, each with one thread on a core
of its own where there are enough (with fewer cores, ranks share them, which the table says):

  updates    one update of multi-task multi-head SAC as in ``configs/experiment/mtmhsac.yaml``,
             with 1, 2 and 4 ranks: strong scaling (the ranks share one batch) and weak scaling (a
             batch for each rank), split into compute, reduction and waiting for other ranks
  methods    bytes and messages that each gradient method reduces in an update, with its time
  runs       environment steps per second of whole runs through the command line; every rank has the
             environments and the batch of the one process beside it, and no workers
  exchanges  averages of tensors of several sizes, from which latency and bandwidth are computed
  costs      what a run of several ranks does beside its updates: the agreement after a vector step,
             gathering a row of metrics, comparing checksums

From these it computes the time of an update on machines that were not measured, which is called a
projection; ``docs/scale.md`` has the formula. Groups of ranks are started once and take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.entrants import Entrant, of_module, paced_arguments, started
from benchmarks.gradients import METHODS
from benchmarks.measuring import (
    NEVER,
    alternate,
    end_on_sigterm,
    heading,
    parser_of,
    positive,
    program,
    refusing,
    say,
    shares,
    shown,
    spread,
    table,
    times_as_fast,
)
from benchmarks.updaters import Work
from mtrl_lightning.envs.vector.vector import usable_cores
from mtrl_lightning.errors import ConfigurationError

PARTS = ("updates", "methods", "runs", "exchanges", "costs")
PARTS_OF_UPDATE = ("compute", "reduction", "waiting")
CHECK_EVERY = 10_000
"""Default of ``rollout.check_every``, in environment steps."""
METRICS_EVERY = 1_000
"""Default of ``metrics.every``, in environment steps."""
SETTLE = 5
"""Updates of a whole run before its first window."""


class Link(NamedTuple):
    """What connects ranks."""

    latency: float
    """Seconds from one rank to the next, for a message without content."""
    bandwidth: float
    """Bytes per second that each rank sends."""


class Machines(NamedTuple):
    """What a projection is made for."""

    name: str
    nodes: int
    ranks_per_node: int


MACHINES = (Machines("8 ranks on 1 node", 1, 8), Machines("32 ranks on 4 nodes", 4, 8))
"""One node with 8 GPUs, and 4 of them."""


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("scaling", __doc__, repeats=5)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default all)")
    add(
        "--ranks",
        nargs="+",
        type=positive,
        default=[1, 2, 4],
        help="numbers of ranks, the first of which must be 1 (default %(default)s)",
    )
    add("--num_tasks", type=positive, default=10, help="of an update (default %(default)s)")
    add("--width", type=positive, default=400, help="of the hidden layers (default %(default)s)")
    add("--depth", type=positive, default=3, help="number of hidden layers (default %(default)s)")
    add(
        "--rows",
        type=positive,
        default=128,
        help="of the batch for each task; the largest number of ranks has to divide it"
        " (default %(default)s)",
    )
    add("--updates", type=positive, default=6, help="of a window (default %(default)s)")
    add(
        "--methods",
        nargs="+",
        choices=list(METHODS),
        default=list(METHODS),
        help="gradient methods (default all)",
    )
    add(
        "--configs",
        nargs="+",
        default=["experiment/mtmhsac", "quickstart"],
        help="whole runs (default %(default)s)",
    )
    add(
        "--also",
        nargs="*",
        default=[],
        metavar="OPTION=VALUE",
        help="further options of the whole runs, without the dashes",
    )
    add("--batch_sizes", nargs="+", type=positive, default=[1280, 192], help="of each run's rank")
    add("--copies", nargs="+", type=positive, default=[1, 6], help="of each task, likewise")
    add("--steps", nargs="+", type=positive, default=[10, 80], help="vector steps of a window")
    add(
        "--warmup",
        type=positive,
        default=1_000,
        help="environment steps of a whole run's rank with random actions (default %(default)s)",
    )
    add(
        "--bytes",
        nargs="+",
        type=positive,
        default=[4, 400_000, 4_000_000, 40_000_000],
        help="of the exchanges; the first is the latency's, the last the bandwidth's"
        " (default %(default)s)",
    )
    add("--times", type=positive, default=10, help="exchanges of a window (default %(default)s)")
    add(
        "--minutes",
        type=float,
        default=6.0,
        help="after which no further round is started (default %(default)s)",
    )
    add(
        "--device_ms",
        type=float,
        help="of one rank's update on the machine of the projection (default: the one measured"
        " here)",
    )
    add(
        "--link",
        nargs=2,
        type=float,
        action="append",
        default=[],
        metavar=("MICROSECONDS", "GBYTES"),
        help="a link of the projection beside the one measured here: latency of a message in"
        " microseconds and 10^9 bytes per second and rank; give several",
    )
    options = parser.parse_args(args)
    with refusing(parser):
        _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    if options.ranks[0] != 1 or len(options.ranks) < 2:
        raise ConfigurationError("--ranks takes 1 first, and at least one other number after it")
    if any(options.rows % number for number in options.ranks):
        raise ConfigurationError(
            f"--rows {options.rows} cannot be shared out among {options.ranks} ranks"
        )
    lengths = {len(getattr(options, name)) for name in ("batch_sizes", "copies", "steps")}
    if lengths != {len(options.configs)}:
        raise ConfigurationError(
            "--batch_sizes, --copies and --steps take one number for each of --configs"
        )


def base_of(options: argparse.Namespace) -> Work:
    """Return the update of the one process."""
    return Work(
        tasks=options.num_tasks,
        batch_size=options.rows * options.num_tasks,
        width=options.width,
        depth=options.depth,
        precision="32-true",
        compile="none",
        device="cpu",
        threads=1,
        steps=options.updates,
        settle=1,
    )


def works_of(size: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the updates that a group of ranks makes, by name.

    ``weak`` has the whole batch on every rank, ``strong`` a share of it; the gradient methods are
    measured with the first group of several ranks, with the whole batch on every rank.
    """
    base = base_of(options)
    shared = replace(base, batch_size=base.batch_size // size)
    works = {"weak": asdict(base) | {"method": "mean"}}
    if size > 1:
        works["strong"] = asdict(shared) | {"method": "mean"}
    if size == options.ranks[1] and "methods" in options.parts:
        works |= {name: asdict(base) | {"method": name} for name in options.methods}
    return works


def ask(group: Entrant, request: str, **options: Any) -> dict[str, Any]:
    """Return a group's answer to a request of ``benchmarks.ranks``."""
    return group.ask(json.dumps({"request": request, **options}))


def rounds_of(
    windows: Mapping[str, Callable[[], float]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of every variant, round by round, in turn."""
    return alternate(windows, options.repeats, options.minutes)


# ---- updates and gradient methods ----


class Windows:
    """Ask groups for windows of updates in turn, and keep what they answer.

    Args:
        groups: by number of ranks.
        updates: of a window.
        options: of the program.
    """

    def __init__(
        self, groups: Mapping[int, Entrant], updates: int, options: argparse.Namespace
    ) -> None:
        self._groups = groups
        self._updates = updates
        self._options = options
        self.answers: dict[str, list[dict[str, Any]]] = {}

    def measure(self, wanted: Mapping[str, tuple[int, str]]) -> dict[str, list[float]]:
        """Return the seconds of an update of each variant, by rounds, after one round to settle.

        Args:
            wanted: number of ranks and name of the work, by variant.
        """
        for variant in wanted:
            self._window(variant, *wanted[variant], times=1)
        self.answers = {}
        windows = {
            variant: partial(self._window, variant, size, work, self._updates)
            for variant, (size, work) in wanted.items()
        }
        return rounds_of(windows, self._options)

    def _window(self, variant: str, size: int, work: str, times: int) -> float:
        answer = ask(self._groups[size], "update", name=work, times=times)
        self.answers.setdefault(variant, []).append(answer)
        return answer["seconds"] / times

    def row(self, variant: str, seconds: Sequence[float]) -> dict[str, Any]:
        """Return what a table says of a variant."""
        answers = self.answers[variant]
        return {
            "variant": variant,
            "rounds": [value * 1e3 for value in seconds],
            **spread([value * 1e3 for value in seconds]),
            "parts_ms": {
                part: spread([answer["parts"][part] * 1e3 for answer in answers])
                for part in PARTS_OF_UPDATE
            },
            "bytes": answers[-1]["bytes"],
            "messages": answers[-1]["messages"],
        }


def measure_updates(groups: Mapping[int, Entrant], options: argparse.Namespace) -> dict[str, Any]:
    """Return the table of strong and weak scaling."""
    say("updates")
    wanted = {"1 rank": (1, "weak")}
    for how in ("strong", "weak"):
        wanted |= {f"{size} ranks, {how}": (size, how) for size in options.ranks[1:]}
    windows = Windows(groups, options.updates, options)
    seconds = windows.measure(wanted)
    rows = []
    for variant, (size, how) in wanted.items():
        row = windows.row(variant, seconds[variant])
        batches = size if how == "weak" else 1
        one = [batches * value for value in seconds["1 rank"]]
        row["ranks"] = size
        row["batch_size"] = batches * options.rows * options.num_tasks
        row["throughput"] = times_as_fast(seconds[variant], one)
        rows.append(row)
    return {"unit": "ms per update", "results": rows}


def measure_methods(groups: Mapping[int, Entrant], options: argparse.Namespace) -> dict[str, Any]:
    """Return the table of gradient methods, with the first number of several ranks."""
    say("gradient methods")
    size = options.ranks[1]
    wanted = {name: (size, name) for name in options.methods}
    windows = Windows(groups, max(1, options.updates // 3), options)
    seconds = windows.measure(wanted)
    rows = [windows.row(name, seconds[name]) for name in wanted]
    return {"unit": "ms per update", "ranks": size, "results": rows}


# ---- exchanges and costs ----


def measure_exchanges(groups: Mapping[int, Entrant], options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of averages by size, and each group's latency and bandwidth."""
    say("exchanges")
    several = {size: group for size, group in groups.items() if size > 1}

    def window(size: int, num_bytes: int) -> float:
        answer = ask(several[size], "exchange", num_bytes=num_bytes, times=options.times)
        return answer["seconds"] / options.times

    names = {
        (size, num_bytes): f"{size} ranks, {num_bytes:,} bytes"
        for size in several
        for num_bytes in options.bytes
    }
    seconds = rounds_of({name: partial(window, *key) for key, name in names.items()}, options)
    rows = [
        {"ranks": key[0], "bytes": key[1], **spread([value * 1e3 for value in seconds[name]])}
        for key, name in names.items()
    ]
    links = {}
    for size in several:
        first, last = (
            statistics.median(seconds[names[size, num_bytes]])
            for num_bytes in (options.bytes[0], options.bytes[-1])
        )
        links[str(size)] = link_of(size, first, last, options.bytes[-1])._asdict()
    return {"unit": "ms", "results": rows, "links": links}


def link_of(size: int, latency: float, seconds: float, num_bytes: int) -> Link:
    """Return the link of a ring of ranks.

    A message goes ``2 (N - 1)`` times from one rank to the next, and each time carries an ``N``-th
    of the bytes.

    Args:
        size: number of ranks, ``N``.
        latency: seconds of a message without content.
        seconds: of a large message.
        num_bytes: of the large message.
    """
    hops = 2 * (size - 1)
    sent = hops / size * num_bytes
    return Link(latency / hops, sent / max(seconds - latency, 1e-9))


def measure_costs(groups: Mapping[int, Entrant], options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of what a run does beside its updates, and their share of an update.

    A vector step steps every task once on every rank and has one update of the weak scaling.
    """
    say("costs")
    rows = []
    for size, group in groups.items():
        if size == 1:
            continue
        steps = size * options.num_tasks
        kinds: dict[str, tuple[dict[str, Any], float]] = {
            "agree": ({}, 1.0),
            "log_metrics": ({"name": "weak"}, steps / METRICS_EVERY),
            "check": ({"name": "weak"}, steps / CHECK_EVERY),
        }
        found: dict[str, Callable[[], float]] = {
            kind: partial(_seconds_of, group, kind, given, options.times)
            for kind, (given, _) in kinds.items()
        }
        found["update"] = partial(
            _seconds_of, group, "update", {"name": "weak"}, max(1, options.updates // 3)
        )
        seconds = rounds_of(found, options)
        for kind, (_, per_update) in kinds.items():
            pairs = zip(seconds[kind], seconds["update"], strict=True)
            rows.append(
                {
                    "ranks": size,
                    "what": kind,
                    **spread([value * 1e3 for value in seconds[kind]]),
                    "per_update": per_update,
                    "share": spread([cost * per_update / one for cost, one in pairs]),
                }
            )
    return {"unit": "ms", "results": rows}


def _seconds_of(group: Entrant, kind: str, given: Mapping[str, Any], times: int) -> float:
    return ask(group, kind, times=times, **given)["seconds"] / times


# ---- whole runs ----


def runs(options: argparse.Namespace, folder: Path) -> dict[tuple[str, int], Entrant]:
    """Return the whole runs by configuration and number of ranks, not started yet."""
    found = {}
    sizes = zip(options.configs, options.batch_sizes, options.copies, options.steps, strict=True)
    for config, batch_size, copies, steps in sizes:
        for size in options.ranks:
            given = {
                "root": folder,
                "name": f"{Path(config).name}_{size}",
                "trainer.accelerator": "cpu",
                "trainer.devices": size,
                "trainer.enable_progress_bar": "false",
                "data.batch_size": size * batch_size,
                "data.capacity": 100_000 * size,
                "rollout.envs_per_task": size * copies,
                "rollout.num_workers": 0,
                "rollout.learner_threads": 1,
                "rollout.warmup_steps": size * options.warmup,
                "rollout.total_steps": NEVER,
                **{
                    f"{section}.every": NEVER for section in ("evaluation", "metrics", "checkpoint")
                },
                **dict(pair.split("=", 1) for pair in options.also),
            }
            command = partial(_command_of_run, config, given, size, steps)
            name = f"{Path(config).name}, {size} ranks"
            found[config, size] = Entrant(name, "ours", command, folder)
    return found


def _command_of_run(
    config: str, given: Mapping[str, Any], size: int, steps: int, descriptor: int
) -> list[str]:
    arguments = paced_arguments([config], given, steps, SETTLE, descriptor)
    return of_module("ranks", {"size": size, "arguments": arguments})(descriptor)


def measure_runs(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the table of whole runs."""
    taking_part = runs(options, folder)
    steps = dict(zip(options.configs, options.steps, strict=True))
    with started(list(taking_part.values())):
        say("whole runs")
        seconds = rounds_of(
            {entrant.name: entrant.window for entrant in taking_part.values()}, options
        )
    rows = []
    for (config, size), entrant in taking_part.items():
        environments = entrant.about["environments"]
        a_step = [value / steps[config] for value in seconds[entrant.name]]
        one = [value / steps[config] for value in seconds[taking_part[config, 1].name]]
        rows.append(
            {
                "config": config,
                "ranks": size,
                "environments": environments,
                "rounds": [value * 1e3 for value in a_step],
                **spread([value * 1e3 for value in a_step]),
                "env_steps_per_second": spread([environments / value for value in a_step]),
                "throughput": times_as_fast(a_step, [size * value for value in one]),
                "time_fractions": entrant.fractions(),
            }
        )
    return {"unit": "ms per vector step", "results": rows}


# ---- projection ----


def projected(update: float, messages: float, num_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an update of several ranks, each with the batch of the one.

    ``t_N = t_1 + m 2 (N - 1) l + 2 (N - 1) / N S / w``: every message goes around the ring of
    ranks twice.

    Args:
        update: seconds of one rank's update, ``t_1``.
        messages: of an update, ``m``.
        num_bytes: reduced in an update, ``S``.
        ranks: ``N``.
        link: latency ``l`` and bandwidth ``w`` between two ranks.
    """
    hops = 2 * (ranks - 1)
    return update + messages * hops * link.latency + hops / ranks * num_bytes / link.bandwidth


def projection(content: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return projections for ``MACHINES``, and for the ranks that were measured beside these."""
    updates = {row["variant"]: row for row in content["updates"]["results"]}
    measured_link = Link(**content["exchanges"]["links"][str(options.ranks[1])])
    one = updates["1 rank"]["median"] / 1e3
    reduced = updates[f"{options.ranks[1]} ranks, weak"]
    num_bytes = reduced["bytes"]
    messages = reduced["messages"]
    rows = []
    for size in options.ranks[1:]:
        expected = projected(one, messages, num_bytes, size, measured_link)
        found = updates[f"{size} ranks, weak"]["median"]
        rows.append(_projected_row(f"{size} ranks here", size, one, expected, measured_link, found))
    device = one if options.device_ms is None else options.device_ms / 1e3
    links = [measured_link, *(Link(micro / 1e6, giga * 1e9) for micro, giga in options.link)]
    for machines in MACHINES:
        ranks = machines.nodes * machines.ranks_per_node
        for link in links:
            expected = projected(device, messages, num_bytes, ranks, link)
            rows.append(_projected_row(machines.name, ranks, device, expected, link, None))
    return {"unit": "ms per update", "bytes": num_bytes, "messages": messages, "results": rows}


def _projected_row(
    name: str, ranks: int, one: float, expected: float, link: Link, measured: float | None
) -> dict[str, Any]:
    return {
        "machines": name,
        "latency_us": link.latency * 1e6,
        "gbytes_per_second": link.bandwidth / 1e9,
        "one_rank_ms": one * 1e3,
        "projected_ms": expected * 1e3,
        "measured_ms": measured,
        "throughput": ranks * one / expected,
    }


# ---- the program ----


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON's content."""
    content: dict[str, Any] = heading("scaling", options)
    content["shared_cores"] = [number for number in options.ranks if number > usable_cores()]
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        folder = Path(name)
        groups = {
            size: Entrant(
                f"{size} ranks",
                "ours",
                of_module("ranks", {"size": size, "works": works_of(size, options)}),
                folder,
            )
            for size in options.ranks
        }
        parts = {
            "updates": measure_updates,
            "methods": measure_methods,
            "exchanges": measure_exchanges,
            "costs": measure_costs,
        }
        if {*parts} & {*options.parts}:
            with started(list(groups.values())):
                for part, measure_part in parts.items():
                    if part in options.parts:
                        content[part] = measure_part(groups, options)
        if "runs" in options.parts:
            content["runs"] = measure_runs(options, folder)
    if {"updates", "exchanges"} <= {*options.parts}:
        content["projection"] = projection(content, options)
    return content


def text_of(content: dict[str, Any]) -> str:
    """Return the tables."""
    settings = content["settings"]
    rounds = f"median [smallest, largest] of up to {settings['repeats']} rounds"
    parts = []
    if content["shared_cores"]:
        sizes = ", ".join(map(str, content["shared_cores"]))
        cores = content["machine"]["cores"]
        parts.append(f"{sizes} ranks share {cores} cores: their rows show no scaling")
    update = (
        f"SAC on {settings['num_tasks']} tasks, {settings['depth']} x {settings['width']},"
        f" {settings['rows']} rows of each task, one thread per rank"
    )
    if "updates" in content:
        head = ["updates", "batch", "ms", *PARTS_OF_UPDATE, "messages", "times the throughput"]
        lines = [
            [
                row["variant"],
                f"{row['batch_size']:,}",
                *_update_cells(row),
                f"{row['messages']:.1f}",
                shown(row["throughput"]),
            ]
            for row in content["updates"]["results"]
        ]
        parts.append(f"{update}: {rounds}\n{table([head, *lines])}")
    if "methods" in content:
        found = content["methods"]
        head = ["gradient method", "ms", *PARTS_OF_UPDATE, "bytes", "messages"]
        lines = [
            [row["variant"], *_update_cells(row), f"{row['bytes']:,.0f}", f"{row['messages']:.1f}"]
            for row in found["results"]
        ]
        parts.append(f"{update}, {found['ranks']} ranks, weak: {rounds}\n{table([head, *lines])}")
    if "runs" in content:
        head = [
            "whole run",
            "ranks",
            "ms per vector step",
            "env steps/s",
            "times the steps",
            "time",
        ]
        lines = [
            [
                row["config"],
                str(row["ranks"]),
                shown(row),
                f"{row['env_steps_per_second']['median']:,.0f}",
                shown(row["throughput"]),
                shares(row["time_fractions"]),
            ]
            for row in content["runs"]["results"]
        ]
        parts.append(f"one thread and no worker per rank: {rounds}\n{table([head, *lines])}")
    if "exchanges" in content:
        head = ["average", "bytes", "ms"]
        lines = [
            [f"{row['ranks']} ranks", f"{row['bytes']:,}", shown(row, 3)]
            for row in content["exchanges"]["results"]
        ]
        links = [
            f"{size} ranks: {link['latency'] * 1e6:,.0f} us and"
            f" {link['bandwidth'] / 1e9:.2f} 10^9 bytes/s from one rank to the next"
            for size, link in content["exchanges"]["links"].items()
        ]
        parts.append("\n".join([f"exchanges: {rounds}", table([head, *lines]), *links]))
    if "costs" in content:
        head = ["cost", "ranks", "ms", "times per update", "% of an update"]
        lines = [
            [
                row["what"],
                str(row["ranks"]),
                shown(row, 3),
                f"{row['per_update']:g}",
                shown({key: 100 * value for key, value in row["share"].items()}),
            ]
            for row in content["costs"]["results"]
        ]
        parts.append(f"beside the update: {rounds}\n{table([head, *lines])}")
    if "projection" in content:
        parts.append(_projection_text(content["projection"]))
    return "\n\n".join(parts)


def _update_cells(row: Mapping[str, Any]) -> list[str]:
    medians = [row["parts_ms"][part]["median"] for part in PARTS_OF_UPDATE]
    return [shown(row, 1), *(f"{value:.1f}" for value in medians)]


def _projection_text(found: Mapping[str, Any]) -> str:
    head = [
        "projection",
        "us",
        "10^9 bytes/s",
        "ms of one rank",
        "ms projected",
        "ms measured",
        "times the throughput",
    ]
    lines = [
        [
            row["machines"],
            f"{row['latency_us']:,.0f}",
            f"{row['gbytes_per_second']:.2f}",
            f"{row['one_rank_ms']:.1f}",
            f"{row['projected_ms']:.1f}",
            "-" if row["measured_ms"] is None else f"{row['measured_ms']:.1f}",
            f"{row['throughput']:.1f}",
        ]
        for row in found["results"]
    ]
    title = (
        f"a projection, no measurement, of weak scaling with {found['messages']:.0f} messages and"
        f" {found['bytes']:,.0f} bytes in an update"
    )
    return f"{title}\n{table([head, *lines])}"


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
