"""What the replay costs: adding transitions, drawing batches, and memory.

``python -m benchmarks.replay`` fills four replays with transitions of MetaWorld's sizes and takes
turns with them:

  ours   draws the same number of transitions of every task
  sb3    Stable-Baselines3's, with the one-hot in the observation and MetaWorld's float64; draws
         from all transitions
  rings  NumPy arrays as in the plain loop, with the one-hot; draws as ours does
  naive  a list of tuples, as one writes it first; draws from all transitions

It shows the microseconds of adding a vector step and of drawing a batch, the bytes of a transition,
and the share that drawing has of an update (``SAC.training_step`` on a batch of that size), which
shall be below 5 %.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import (
    add_precisions,
    alternate,
    choose_precisions,
    end_on_sigterm,
    heading,
    parser_of,
    positive,
    program,
    refusing,
    report,
    require,
    results,
    say,
    shown,
    spread,
)
from benchmarks.pacing import synchronize
from benchmarks.replays import NaiveReplay, make_replays
from benchmarks.updaters import Work, direct_update, make_batches, make_sac
from mtrl_lightning.resources import keep_freed_memory

KINDS = ("ours", "sb3", "rings", "naive")
SHARE = 0.05
"""Of an update, below which drawing a batch shall stay."""


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("replay", __doc__, repeats=7)
    add = parser.add_argument
    add(
        "--tasks",
        nargs="+",
        type=positive,
        default=[10, 50],
        help="each a table (default %(default)s)",
    )
    add("--rows", type=positive, default=128, help="of a batch for each task (default %(default)s)")
    add(
        "--capacity",
        type=positive,
        default=200_000,
        help="transitions that are held (default %(default)s)",
    )
    add("--variants", nargs="+", choices=KINDS, default=list(KINDS), help="(default all)")
    add(
        "--calls",
        type=positive,
        default=50,
        help="of drawing in a round; ten times as many of adding (default %(default)s)",
    )
    add("--updates", type=positive, default=3, help="in a round (default %(default)s)")
    add(
        "--width",
        type=positive,
        default=400,
        help="of the updated networks' hidden layers (default %(default)s)",
    )
    add(
        "--depth",
        type=positive,
        default=3,
        help="number of their hidden layers (default %(default)s)",
    )
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add_precisions(parser)
    add("--threads", type=int, help="PyTorch's (default its own choice, one per core)")
    options = parser.parse_args(args)
    with refusing(parser):
        if "sb3" in options.variants:
            require("stable_baselines3", "leave it out with --variants ours rings naive")
    choose_precisions(options)
    return options


def timed(call: Callable[[], Any], calls: int) -> Callable[[], float]:
    """Return what measures the seconds of one of several calls."""

    def measure() -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize()
        return (time.perf_counter() - start) / calls

    return measure


def measured(num_tasks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return one table's content."""
    say(f"{num_tasks} tasks: filling")
    work = Work(
        tasks=num_tasks,
        batch_size=options.rows * num_tasks,
        width=options.width,
        depth=options.depth,
        precision="32-true",
        compile="none",
        device=options.device,
        threads=options.threads,
        steps=0,
        settle=0,
    )
    replays = make_replays(options.variants, work, options.capacity)
    measures: dict[str, Callable[[], float]] = {}
    for name, replay in replays.items():
        measures[f"{name}, add"] = timed(replay.add, 10 * options.calls)
    for name, replay in replays.items():
        calls = max(1, options.calls // 10) if isinstance(replay, NaiveReplay) else options.calls
        measures[f"{name}, draw"] = timed(replay.draw, calls)
    measures |= {f"update {p}": updates(work, p, options.updates) for p in options.precisions}
    say(f"{num_tasks} tasks: {options.repeats} rounds")
    alternate(measures, 1)  # memory is touched, code is loaded
    seconds = alternate(measures, options.repeats)
    tables = {}
    for what in ("add", "draw"):
        found = {name: seconds[f"{name}, {what}"] for name in replays}
        tables[what] = results(found, ["sb3"] if "sb3" in found else [], scale=1e6)
    shares = {
        precision: {
            name: spread(
                [
                    a / b
                    for a, b in zip(
                        seconds[f"{name}, draw"], seconds[f"update {precision}"], strict=True
                    )
                ]
            )
            for name in replays
        }
        for precision in options.precisions
    }
    sizes = {name: replay.bytes_per_transition for name, replay in replays.items()}
    milliseconds = {p: spread([s * 1e3 for s in seconds[f"update {p}"]]) for p in shares}
    return {
        "tasks": num_tasks,
        "batch_size": work.batch_size,
        "unit": "us",
        "results": tables,
        "share_of_update": shares,
        "update_ms": milliseconds,
        "bytes_per_transition": sizes,
    }


def updates(work: Work, precision: str, number: int) -> Callable[[], float]:
    """Return what measures an update."""
    chosen = Work(**{**vars(work), "precision": precision})
    update = direct_update(chosen, make_sac(chosen))
    batch = make_batches(chosen)[0]
    return timed(lambda: update(batch), number)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON's content."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a run does; all variants gain from it
    random.seed(0)
    np.random.seed(0)  # Stable-Baselines3 draws from the global generator
    tables = [measured(number, options) for number in options.tasks]
    return {
        **heading("replay", options),
        "threads": torch.get_num_threads(),
        "wanted_share_of_update": SHARE,
        "tables": tables,
    }


def text_of(content: dict[str, Any]) -> str:
    """Return the tables."""
    left_out = content["settings"]["left_out"]
    parts = [left_out] if left_out else []
    for found in content["tables"]:
        where = f"{found['tasks']} tasks, {content['settings']['capacity']:,} transitions held"
        parts.append(report(f"adding a vector step; {where}", found["results"]["add"], "us"))
        rows = [
            {
                **row,
                "bytes per transition": f"{found['bytes_per_transition'][row['variant']]:,.0f}",
                **{
                    f"of an update {p}": f"{share[row['variant']]['median']:.1%}"
                    for p, share in _shares(found)
                },
            }
            for row in found["results"]["draw"]
        ]
        columns = ("bytes per transition", *(f"of an update {p}" for p, _ in _shares(found)))
        parts.append(
            report(f"drawing a batch of {found['batch_size']}; {where}", rows, "us", columns)
        )
        updates = ", ".join(f"{shown(value)} ms in {p}" for p, value in found["update_ms"].items())
        parts.append(f"an update takes {updates}, with {content['threads']} threads of PyTorch")
    return "\n\n".join(parts)


def _shares(found: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(found["share_of_update"].items())


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
