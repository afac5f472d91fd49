"""What several ranks (processes that train one run) gain and cost.

Every rank computes with one thread on a core of its own, where there are enough; with fewer cores
ranks share them, and the rows show the cost of sharing. Parts (``--parts``):

  updates  one update of SAC as in configs/experiment/mtmhsac.yaml with several ranks: strong
           scaling (they share one batch) and weak scaling (a batch for each), split into compute,
           reduction, and waiting for other ranks
  methods  bytes and messages that each gradient method reduces in an update, with its time
  runs     whole runs through the command line; every rank has the environments and the batch of the
           one process beside it, and no workers

Groups of ranks are started once and take turns. With ``--device cuda`` each rank has a GPU of its
own, for which it waits at the begin and the end of each exchange.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measuring import (
    PIPE,
    Program,
    Variant,
    alternate,
    call_of,
    positive,
    ratios,
    rows_of,
    say,
    spread,
    started,
    synchronize,
    take_turns,
)
from benchmarks.updates import GRADIENTS, Work, direct_of
from benchmarks.whole_runs import NO_INTERVALS, paced_arguments
from mtrl_lightning.cores import usable_cores
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.strategy import backend_for
from mtrl_lightning.resources import keep_freed_memory

PARTS = ("updates", "methods", "runs")
SHARES = ("compute", "reduction", "waiting")
WARMUP = 1_000
"""Random env steps of a rank of a whole run."""
SETTLE = 5
"""Updates of a whole run before its first window."""
MESSAGES = ("all_reduce", "all_gather", "broadcast")
"""Functions of ``torch.distributed`` that an update calls."""
EXCHANGES = ("average", "average_gradients", "gather_tensor", "largest")
"""Functions of ``mtrl_lightning.ranks.distributed`` that call them, and copy the tensors."""
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
                f"--rows {options.rows} cannot be shared out among {size} ranks: give a multiple"
            )
    if options.device == "cuda" and max(options.ranks) > torch.cuda.device_count():
        raise ConfigurationError(
            f"--ranks {max(options.ranks)} needs as many GPUs, and there are"
            f" {torch.cuda.device_count()}: give fewer, or --device cpu"
        )
    for size in options.ranks:
        if size > usable_cores():
            options.notes.append(f"{size} ranks share {usable_cores()} cores: no scaling to see")


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
            os.close(int(os.environ[PIPE]))  # the first rank alone writes to it
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


def run_ranks(size: int, arguments: list[str]) -> None:
    """Train with several ranks through the command line, as ``torchrun`` starts it."""
    start_ranks(size)
    from mtrl_lightning.__main__ import main as command_line

    command_line(arguments)


def serve_ranks(size: int, device: str, works: dict[str, dict[str, Any]]) -> None:
    """Answer the requests on the first rank's standard input with lines of JSON, until it ends.

    Args:
        size: number of ranks.
        device: kind of device of each.
        works: the updates by name, each with the options of ``Work``, and ``gradient``.
    """
    rank = start_ranks(size)
    keep_freed_memory()  # as a run does
    if device == "cuda":
        torch.cuda.set_device(rank)
    if size > 1:
        dist.init_process_group(backend_for(torch.device(device)))
    log = ExchangeLog()
    updates = {}
    for name, options in works.items():
        method = options.pop("gradient")
        updates[name] = direct_of(Work(**options), method)
    target = int(os.environ[PIPE]) if rank == 0 else os.open(os.devnull, os.O_WRONLY)
    out = os.fdopen(target, "w", buffering=1)
    out.write("{}\n")
    while line := distributed.broadcast(sys.stdin.readline() if rank == 0 else ""):
        request = json.loads(line)
        measured = update_window(updates[request["work"]], request["times"], log)
        out.write(json.dumps(measured) + "\n")


class ExchangeLog:
    """Note when this rank begins and ends each exchange, and its messages and bytes.

    It replaces functions of ``torch.distributed`` and of ``mtrl_lightning.ranks.distributed``.
    """

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.messages: list[int] = []
        """Bytes of each."""
        self._depth = 0
        for name in MESSAGES:
            setattr(dist, name, self._noting(getattr(dist, name), is_message=True))
        for name in EXCHANGES:
            setattr(distributed, name, self._noting(getattr(distributed, name), is_message=False))

    def clear(self) -> None:
        """Forget everything."""
        self.times = []
        self.messages = []

    def _noting(self, function: Callable[..., Any], is_message: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*arguments: Any, **options: Any) -> Any:
            if is_message:
                tensor = next(one for one in arguments if isinstance(one, Tensor))
                self.messages.append(tensor.nbytes)
            self._depth += 1
            synchronize()
            begin = time.perf_counter()
            result = function(*arguments, **options)
            synchronize()
            self._depth -= 1
            if self._depth == 0:
                self.times.append((begin, time.perf_counter()))
            return result

        return noting


def split_window(
    seconds_N: list[float], times_NX2: list[list[tuple[float, float]]]
) -> dict[str, float]:
    """Split the seconds of a window into ``compute``, ``reduction`` and ``waiting``.

    An exchange starts when the last rank has begun it: until then the others wait. From then on
    until a rank ends it is reduction, with the copying of tensors. Everything else is compute. All
    three are means over the ranks.

    Args:
        seconds_N: of the window, on each rank.
        times_NX2: when each rank has begun and ended each exchange.
    """
    seconds = float(np.mean(seconds_N))
    times = np.array(times_NX2).reshape(len(seconds_N), -1, 2)
    last_X = times[:, :, 0].max(0)
    waiting = float((last_X - times[:, :, 0]).sum(1).mean())
    # a rank that is late to read may leave before another one enters the next exchange
    reduction = float((times[:, :, 1] - last_X).clip(min=0).sum(1).mean())
    return {
        "compute": seconds - waiting - reduction,
        "reduction": reduction,
        "waiting": waiting,
    }


def update_window(update: Callable[[], Any], times: int, log: ExchangeLog) -> dict[str, Any]:
    """Make updates together with the other ranks; return the window's ``seconds``.

    Per update: ``shares``, the seconds of ``split_window``, ``bytes`` and ``messages``.
    """
    distributed.total(0)
    log.clear()
    begin = time.perf_counter()
    for _ in range(times):
        update()
    synchronize()
    seconds = time.perf_counter() - begin
    messages = log.messages
    seconds_N, times_NX2 = map(list, zip(*distributed.gather((seconds, log.times)), strict=True))
    parts = split_window(seconds_N, times_NX2)  # type: ignore[arg-type]
    return {
        "seconds": seconds,
        "shares": {key: value / times for key, value in parts.items()},
        "bytes": sum(messages) / times,
        "messages": len(messages) / times,
    }


# ---- updates and gradient methods ----


def works_of(size: int, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the updates that a group of ranks makes, by name.

    ``weak`` has the whole batch on every rank, ``strong`` a share of it; the gradient methods are
    measured with the first group of several ranks, with the whole batch on every rank.
    """
    batch_size = options.rows * options.tasks
    base = Work(options.tasks, batch_size, options.width, options.depth, options.device, threads=1)
    shared = replace(base, batch_size=base.batch_size // size)
    works = {"weak": asdict(base) | {"gradient": "mean"}}
    if size > 1:
        works["strong"] = asdict(shared) | {"gradient": "mean"}
    if size == options.ranks[1] and "methods" in options.parts:
        works |= {name: asdict(base) | {"gradient": name} for name in GRADIENTS}
    return works


def rows_of_updates(
    works: Mapping[str, tuple[int, str]],
    times: int,
    groups: Mapping[int, Variant],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Let groups update in turn; return a row per variant with the parts of its time.

    ``works`` has the number of ranks and the name of the work, by variant.
    """
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in works}

    def window(name: str, number: int) -> float:
        size, work = works[name]
        answer = groups[size].ask(json.dumps({"work": work, "times": number}))
        answers[name].append(answer)
        return answer["seconds"] / number

    for name, found in answers.items():
        window(name, 1)  # memory is touched, code is loaded
        found.clear()
    windows = {name: partial(window, name, times) for name in works}
    rows = rows_of(alternate(windows, options.rounds))
    for row in rows:
        found = answers[row["variant"]]
        for share in SHARES:
            row[f"ms {share}"] = spread([one["shares"][share] * 1e3 for one in found])
        row["bytes"] = found[-1]["bytes"]
        row["messages"] = found[-1]["messages"]
    return rows


def updates_table(groups: Mapping[int, Variant], options: argparse.Namespace) -> dict[str, Any]:
    """Return the table of strong and weak scaling."""
    say("updates")
    works = {"1 rank": (1, "weak")}
    for how in ("strong", "weak"):
        works |= {f"{size} ranks, {how}": (size, how) for size in options.ranks[1:]}
    rows = rows_of_updates(works, options.updates, groups, options)
    one = rows[0]["rounds"]
    for row, (size, how) in zip(rows, works.values(), strict=True):
        batches = size if how == "weak" else 1
        row["batch"] = batches * options.rows * options.tasks
        row["times the rows/s of 1 rank"] = ratios(
            [batches * value for value in one], row["rounds"]
        )
    title = f"ms per update, {options.tasks} tasks, {options.depth} x {options.width}"
    return {"title": title, "rows": rows}


def methods_table(groups: Mapping[int, Variant], options: argparse.Namespace) -> dict[str, Any]:
    """Return the table of gradient methods, with the first number of several ranks."""
    say("gradient methods")
    size = options.ranks[1]
    works = {name: (size, name) for name in GRADIENTS}
    rows = rows_of_updates(works, max(1, options.updates // 3), groups, options)
    return {"title": f"gradient methods, {size} ranks, weak scaling: ms per update", "rows": rows}


# ---- whole runs ----


def runs_of(options: argparse.Namespace, folder: Path) -> dict[tuple[str, int], Variant]:
    """Return the whole runs by configuration and number of ranks, not started yet."""
    runs = {}
    for config in RUNS:
        batch_size, envs_per_task, steps = RUNS[config]
        for size in options.ranks:
            given = {
                "root": folder,
                "name": f"{Path(config).name}_{size}",
                "trainer.accelerator": "gpu" if options.device == "cuda" else "cpu",
                "trainer.devices": size,
                "data.batch_size": size * batch_size,
                "data.capacity": 100_000 * size,
                "rollout.envs_per_task": size * envs_per_task,
                "rollout.num_workers": 0,
                "rollout.learner_threads": 1,
                "rollout.warmup_steps": size * WARMUP,
                **NO_INTERVALS,
            }
            arguments = paced_arguments(config, given, steps, SETTLE)
            command = call_of(run_ranks, {"size": size, "arguments": arguments})
            runs[config, size] = Variant(f"{Path(config).name}, {size} ranks", command)
    return runs


def runs_table(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
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
    return {"title": "ms per vector step of whole runs", "rows": rows}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the tables."""
    tables = []
    parts = {"updates": updates_table, "methods": methods_table}
    if {*parts} & {*options.parts}:
        groups = {}
        for size in options.ranks:
            given = {"size": size, "device": options.device, "works": works_of(size, options)}
            groups[size] = Variant(f"{size} ranks", call_of(serve_ranks, given))
        with started(list(groups.values())):
            tables += [parts[part](groups, options) for part in parts if part in options.parts]
    if "runs" in options.parts:
        with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
            tables.append(runs_table(options, Path(folder)))
    return {"tables": tables}


program = Program("scaling", __doc__, add_options, measure, _check, device=True)
options_of = program.options_of
main = program.main

if __name__ == "__main__":
    sys.exit(main())
