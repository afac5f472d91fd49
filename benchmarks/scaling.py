"""What several ranks (processes that train one run) gain and cost.

Every rank computes with one thread on a core of its own, where there are enough; with fewer cores
ranks share them, and the rows show the cost of sharing. Parts (``--parts``):

  updates  one update of SAC as in configs/experiment/mtmhsac.yaml with several ranks: strong
           scaling (they share one batch) and weak scaling (a batch for each)
  methods  an update with each gradient method
  runs     whole runs through the command line; every rank has the environments and the batch of the
           one process beside it, and no workers

Groups of ranks are started once and take turns. With ``--device cuda`` each rank has a GPU of its
own.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measuring import (
    Pacer,
    Program,
    Table,
    Variant,
    alternate,
    positive,
    ratios,
    rows_of,
    say,
    spread,
    started,
    take_turns,
    timed,
)
from benchmarks.updates import GRADIENTS, Work, direct_of
from benchmarks.whole_runs import NO_INTERVALS, train_ours
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.resources import keep_freed_memory

PARTS = ("updates", "methods", "runs")
WARMUP = 1_000
"""Random env steps of a rank of a whole run."""
SETTLE = 5
"""Updates of a whole run before its first window."""
RUNS = {"experiment/mtmhsac": (1280, 1, 10), "quickstart": (192, 6, 80)}
"""Batch size and environments per task of a rank of a whole run, and vector steps of a window."""


def add_options(add: Callable[..., Any]) -> None:
    """Add the benchmark's own options."""
    text = "numbers of ranks, the first of which must be 1"
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    add("--ranks", nargs="+", type=positive, default=[1, 2, 4], help=text)
    add("--tasks", type=positive, default=10, help="of an update")
    text = "per task of the batch; the numbers of ranks have to divide it"
    add("--rows", type=positive, default=128, help=text)
    add("--width", type=positive, default=400, help="of the hidden layers")
    add("--depth", type=positive, default=3, help="number of hidden layers")
    add("--updates", type=positive, default=6, help="of a window")


def _check(options: argparse.Namespace) -> None:
    if options.ranks[0] != 1 or len(options.ranks) < 2:
        raise ConfigurationError("--ranks takes 1 first, and at least one other number after it")
    for size in options.ranks:
        if options.rows % size:
            raise ConfigurationError(
                f"--rows {options.rows} cannot be divided among {size} ranks: give a multiple"
            )
    if options.device == "cuda" and max(options.ranks) > torch.cuda.device_count():
        raise ConfigurationError(
            f"--ranks {max(options.ranks)} needs as many GPUs, and there are"
            f" {torch.cuda.device_count()}: give fewer, or --device cpu"
        )


# ---- the processes: a group of ranks ----


def start_ranks(size: int) -> int:
    """Start the ranks from 1 on, which end with their process group; return that of this process.

    They are copies of the first one, which has only imported modules: that takes seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    rank = 0
    for other in range(1, size):
        if os.fork() == 0:
            Pacer.connection.close()  # only the first rank uses it
            rank = other
            break
    numbers = {  # as torchrun sets them
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "scaling",
    }
    if size > 1:
        os.environ.update({name: str(value) for name, value in numbers.items()})
    use_one_core(rank)
    return rank


def use_one_core(rank: int) -> None:
    """Compute with one thread, on a core of this rank where a process can choose."""
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)


def run_ranks(size: int, config: str, options: Mapping[str, Any], steps: int, settle: int) -> None:
    """Train with several ranks through the command line, as ``torchrun`` starts it."""
    start_ranks(size)
    train_ours(config, options, steps, settle)


def serve_ranks(size: int, device: str, works: dict[str, tuple[Work, str]]) -> None:
    """Answer the first rank's requests, each the name of a work and a number of updates.

    Args:
        size: number of ranks.
        device: kind of device of each.
        works: the updates by name, each with its gradient method.
    """
    rank = start_ranks(size)
    keep_freed_memory()  # as a run does
    if device == "cuda":
        torch.cuda.set_device(rank)
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    updates = {name: direct_of(work, method) for name, (work, method) in works.items()}
    if rank == 0:
        Pacer.connection.send({})
    while True:
        request: Any = Pacer.connection.recv() if rank == 0 else None
        name, times = distributed.broadcast(request)
        distributed.total(0)  # all start together
        seconds = timed(updates[name], times)()
        if rank == 0:
            Pacer.connection.send({"seconds": seconds})


# ---- updates and gradient methods ----


def works_of(size: int, options: argparse.Namespace) -> dict[str, tuple[Work, str]]:
    """Return the updates that a group of ranks makes, by name.

    ``weak`` has the whole batch on every rank, ``strong`` a share of it; the gradient methods are
    measured with the first group of several ranks, with the whole batch on every rank.
    """
    batch_size = options.rows * options.tasks
    base = Work(options.tasks, batch_size, options.width, options.depth, options.device, threads=1)
    shared = replace(base, batch_size=base.batch_size // size)
    works = {"weak": (base, "mean")}
    if size > 1:
        works["strong"] = (shared, "mean")
    if size == options.ranks[1] and "methods" in options.parts:
        works |= {name: (base, name) for name in GRADIENTS}
    return works


def seconds_of_updates(
    works: Mapping[str, tuple[int, str]],
    times: int,
    groups: Mapping[int, Variant],
    options: argparse.Namespace,
) -> dict[str, list[float]]:
    """Let groups update in turn; return the seconds per update of each variant.

    ``works`` has the number of ranks and the name of the work, by variant.
    """

    def window(size: int, work: str, number: int) -> float:
        return groups[size].ask((work, number))["seconds"]

    for size, work in works.values():
        window(size, work, 1)  # memory is touched, code is loaded
    windows = {name: partial(window, *work, times) for name, work in works.items()}
    return alternate(windows, options.rounds)


def updates_table(groups: Mapping[int, Variant], options: argparse.Namespace) -> Table:
    """Return the table of strong and weak scaling."""
    say("updates")
    works = {"1 rank": (1, "weak")}
    for how in ("strong", "weak"):
        works |= {f"{size} ranks, {how}": (size, how) for size in options.ranks[1:]}
    seconds = seconds_of_updates(works, options.updates, groups, options)
    rows = rows_of(seconds)
    for row, (size, how) in zip(rows, works.values(), strict=True):
        batches = size if how == "weak" else 1
        row["batch"] = batches * options.rows * options.tasks
        row["times the rows/s of 1 rank"] = ratios(
            [batches * value for value in seconds["1 rank"]], seconds[row["variant"]]
        )
    title = f"ms per update, {options.tasks} tasks, {options.depth} x {options.width}"
    return Table(title, rows)


def methods_table(groups: Mapping[int, Variant], options: argparse.Namespace) -> Table:
    """Return the table of gradient methods, with the first number of several ranks."""
    say("gradient methods")
    size = options.ranks[1]
    works = {name: (size, name) for name in GRADIENTS}
    seconds = seconds_of_updates(works, max(1, options.updates // 3), groups, options)
    title = f"gradient methods, {size} ranks, weak scaling: ms per update"
    return Table(title, rows_of(seconds, ["mean"]))


# ---- whole runs ----


def runs_of(options: argparse.Namespace, folder: Path) -> dict[tuple[str, int], Variant]:
    """Return the whole runs by configuration and number of ranks, not started yet."""
    runs = {}
    for config in RUNS:
        batch_size, envs_per_task, steps = RUNS[config]
        for size in options.ranks:
            given = {
                "root": str(folder),
                "name": f"{Path(config).name}_{size}",
                "trainer.accelerator": "gpu" if options.device == "cuda" else "cpu",
                "trainer.devices": size,
                "data.batch_size": size * batch_size,
                "data.capacity": 100_000 * size,
                "data.envs_per_task": size * envs_per_task,
                "data.num_workers": 0,
                "data.learner_threads": 1,
                "data.warmup_steps": size * WARMUP,
                **NO_INTERVALS,
            }
            runs[config, size] = Variant(
                f"{Path(config).name}, {size} ranks",
                run_ranks,
                size=size,
                config=config,
                options=given,
                steps=steps,
                settle=SETTLE,
            )
    return runs


def runs_table(options: argparse.Namespace, folder: Path) -> Table:
    """Return the table of whole runs."""
    say("whole runs")
    runs = runs_of(options, folder)
    seconds = take_turns(list(runs.values()), options.rounds)
    for (config, _), variant in runs.items():
        seconds[variant.name] = [value / RUNS[config][-1] for value in seconds[variant.name]]
    rows = rows_of(seconds)
    for row, ((config, size), variant) in zip(rows, runs.items(), strict=True):
        own = seconds[variant.name]
        one = [size * value for value in seconds[runs[config, 1].name]]
        row["env steps/s"] = spread([variant.about["environments"] / value for value in own])
        row["times the steps/s of 1 rank"] = ratios(one, own)
        row["shares of the time"] = variant.shares()
    return Table("ms per vector step of whole runs", rows)


def measure(options: argparse.Namespace) -> list[Table]:
    """Return the tables."""
    tables = []
    parts = {"updates": updates_table, "methods": methods_table}
    if {*parts} & {*options.parts}:
        groups = {}
        for size in options.ranks:
            groups[size] = Variant(
                f"{size} ranks",
                serve_ranks,
                size=size,
                device=options.device,
                works=works_of(size, options),
            )
        with started(list(groups.values())):
            tables += [parts[part](groups, options) for part in parts if part in options.parts]
    if "runs" in options.parts:
        with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
            tables.append(runs_table(options, Path(folder)))
    return tables


program = Program("scaling", __doc__, add_options, measure, _check, device=True)
options_of = program.options_of
main = program.main

if __name__ == "__main__":
    main()
