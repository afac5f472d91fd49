"""How an update scales with the number of ranks (processes that train one run).

The update is that of SAC as in configs/experiment/mtmhsac.yaml, with strong scaling (the ranks
share one batch) and weak scaling (a batch for each). Every rank computes with one thread on a core
of its own, where there are enough; with fewer cores ranks share them, and the rows show the cost of
sharing. Groups of ranks are started once and take turns. With ``--device cuda`` each rank has a GPU
of its own.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measuring import (
    Pacer,
    Table,
    Variant,
    alternate,
    parser_of,
    positive,
    ratios,
    rows_of,
    run,
    started,
    timed,
)
from benchmarks.updates import Work, direct_of
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.utils.devices import keep_freed_memory

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


def serve_ranks(size: int, device: str, works: dict[str, Work]) -> None:
    """Answer the first rank's requests, each the name of a work and a number of updates.

    Args:
        size: number of ranks.
        device: kind of device of each.
        works: the updates by name.
    """
    rank = start_ranks(size)
    keep_freed_memory()  # as a run does
    if device == "cuda":
        torch.cuda.set_device(rank)
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    updates = {name: direct_of(work) for name, work in works.items()}
    if rank == 0:
        Pacer.connection.send({})
    while True:
        request: Any = Pacer.connection.recv() if rank == 0 else None
        name, times = distributed.broadcast(request)
        distributed.total(0)  # all start together
        seconds = timed(updates[name], times)()
        if rank == 0:
            Pacer.connection.send({"seconds": seconds})


# ---- the table ----


def measure(options: argparse.Namespace) -> list[Table]:
    """Return the table of strong and weak scaling."""
    if options.ranks[0] != 1 or len(options.ranks) < 2:
        raise ConfigurationError("--ranks takes 1 first, and at least one other number after it")
    for size in options.ranks:
        if options.rows % size:
            raise ConfigurationError(f"--rows {options.rows} is no multiple of {size} ranks")
    batch_size = options.rows * options.tasks
    base = Work(options.tasks, batch_size, options.width, options.depth, options.device, threads=1)
    groups = {}
    for size in options.ranks:
        works = {"weak": base, "strong": replace(base, batch_size=batch_size // size)}
        name = f"{size} ranks"
        groups[size] = Variant(name, serve_ranks, size=size, device=options.device, works=works)

    def window(size: int, work: str, number: int) -> float:
        return groups[size].ask((work, number))["seconds"]

    variants = {"1 rank": (1, "weak")}
    for how in ("strong", "weak"):
        variants |= {f"{size} ranks, {how}": (size, how) for size in options.ranks[1:]}
    with started(list(groups.values())):
        for variant in variants.values():
            window(*variant, 1)  # memory is touched, code is loaded
        windows = {name: partial(window, *one, options.updates) for name, one in variants.items()}
        seconds = alternate(windows, options.rounds)
    rows = rows_of(seconds)
    for row, (size, how) in zip(rows, variants.values(), strict=True):
        batches = size if how == "weak" else 1
        row["batch"] = batches * batch_size
        row["times the rows/s of 1 rank"] = ratios(
            [batches * value for value in seconds["1 rank"]], seconds[row["variant"]]
        )
    title = f"ms per update, {options.tasks} tasks, {options.depth} x {options.width}"
    return [Table(title, rows)]


def main(args: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = parser_of("scaling", __doc__, device=True)
    add = parser.add_argument
    text = "numbers of ranks, the first of which must be 1"
    add("--ranks", nargs="+", type=positive, default=[1, 2, 4], help=text)
    add("--tasks", type=positive, default=10, help="of an update")
    text = "per task of the batch; the numbers of ranks have to divide it"
    add("--rows", type=positive, default=128, help=text)
    add("--width", type=positive, default=400, help="of the hidden layers")
    add("--depth", type=positive, default=3, help="number of hidden layers")
    add("--updates", type=positive, default=6, help="of a window")
    run(parser, args, measure)


if __name__ == "__main__":
    main()
