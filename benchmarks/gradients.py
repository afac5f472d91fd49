"""How long an update takes with each gradient method.

``python -m benchmarks.gradients`` measures one update of multi-task multi-head SAC
(critics, actor, temperatures, targets), with the same gradient method for actor and critics and the
numbers of ``configs/experiment/mtmhsac.yaml``, on batches that are there already. The methods
take turns in one process; each is shown as a multiple of the mean's time.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.measuring import (
    PRECISIONS,
    alternate,
    end_on_sigterm,
    heading,
    parser_of,
    positive,
    program,
    report,
    results,
    say,
    shown,
    spread,
)
from benchmarks.pacing import synchronize
from benchmarks.updaters import Work, direct_update, make_batches, make_sac
from mtrl_lightning.gradients import (
    FAMO,
    AlignedMTL,
    CAGrad,
    FairGrad,
    GradientMethod,
    GradNorm,
    Mean,
    NashMTL,
    PCGrad,
)
from mtrl_lightning.resources import keep_freed_memory
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.types import TransitionBatch

METHODS: dict[str, Callable[[EnvSpec], GradientMethod]] = {
    "mean": Mean,
    "famo": FAMO,
    "gradnorm": GradNorm,
    "pcgrad": PCGrad,
    "cagrad": CAGrad,
    "cagrad_fast": partial(CAGrad, num_sampled=4),
    "nash_mtl": NashMTL,
    "aligned_mtl": AlignedMTL,
    "fairgrad": FairGrad,
}
"""As in ``configs/gradient``."""


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("gradients", __doc__, repeats=5)
    add = parser.add_argument
    add(
        "--methods",
        nargs="+",
        choices=list(METHODS),
        default=list(METHODS),
        help="besides the mean (default all)",
    )
    add(
        "--tasks",
        nargs="+",
        type=positive,
        default=[10, 50],
        help="a table for each (default %(default)s)",
    )
    add("--precision", choices=PRECISIONS, default="32-true", help="(default %(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=positive, help="PyTorch's (default its own choice, one per core)")
    add("--width", type=positive, default=400, help="of the hidden layers (default %(default)s)")
    add("--depth", type=positive, default=3, help="number of hidden layers (default %(default)s)")
    add("--rows", type=positive, default=128, help="of a batch for each task (default %(default)s)")
    add(
        "--updates",
        type=positive,
        default=5,
        help="of a window, the first of which also settles (default 5)",
    )
    return parser.parse_args(args)


def window(
    update: Callable[[TransitionBatch], None], batches: Iterable[TransitionBatch], work: Work
) -> float:
    """Make the updates of a window; return its seconds."""
    started = time.perf_counter()
    for batch in itertools.islice(batches, work.steps):
        update(batch)
    synchronize()
    return time.perf_counter() - started


def table(num_tasks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Let the methods take turns; return one table's content."""
    say(f"{num_tasks} tasks")
    work = Work(
        tasks=num_tasks,
        batch_size=options.rows * num_tasks,
        width=options.width,
        depth=options.depth,
        precision=options.precision,
        compile="none",
        device=options.device,
        threads=options.threads,
        steps=options.updates,
        settle=0,
    )
    batches = itertools.cycle(make_batches(work))
    windows = {}
    for name in dict.fromkeys(["mean", *options.methods]):
        method = METHODS[name]
        update = direct_update(work, make_sac(work, actor_gradient=method, critic_gradient=method))
        windows[name] = partial(window, update, batches, work)
        windows[name]()
    seconds = alternate(windows, options.repeats)
    an_update = {name: [value / work.steps for value in values] for name, values in seconds.items()}
    rows = results(an_update, [])
    for row in rows:
        pairs = zip(an_update[row["variant"]], an_update["mean"], strict=True)
        row["times_the_mean"] = spread([seconds / mean for seconds, mean in pairs])
    return {
        "tasks": num_tasks,
        "batch_size": work.batch_size,
        "unit": "ms per update",
        "results": rows,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON's content."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a run does
    tables = [table(num_tasks, options) for num_tasks in options.tasks]
    return {**heading("gradients", options), "threads": torch.get_num_threads(), "tables": tables}


def text_of(content: dict[str, Any]) -> str:
    """Return the tables."""
    settings = content["settings"]
    parts = []
    for found in content["tables"]:
        title = (
            f"{found['tasks']} tasks, batch {found['batch_size']},"
            f" {settings['depth']} x {settings['width']}, {settings['precision']}"
            f" on {settings['device']}, {content['threads']} threads of PyTorch"
        )
        rows = [{**row, "times the mean": shown(row["times_the_mean"])} for row in found["results"]]
        parts.append(report(title, rows, found["unit"], ("times the mean",)))
    return "\n\n".join(parts)


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
