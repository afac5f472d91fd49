"""How fast a suite's environments are stepped, beside Gymnasium's vector environments.

``python -m benchmarks.stepping`` steps MetaWorld's tasks with random actions, with ``--benchmark
dm_control`` those of the DeepMind Control Suite, and with the name of a family, such as
``--benchmark walker_friction``, its tasks. It does so through our ``VectorEnv`` with several
numbers of workers (0 steps in the learner's process), with our cheaper code for the suite and with
the suite's own, and through Gymnasium's ``SyncVectorEnv`` and ``AsyncVectorEnv``. These are made as
MetaWorld makes them (``gymnasium.make_vec("Meta-World/MT10", ...)``), or of Shimmy's wrapper of
dm_control, flattened and padded to one size. All have MetaWorld's reward v2, horizon 500 and 50
goals per task, or dm_control's horizon 1000 and no action repeat, and begin the next episode in the
step that ends one.

The gain over ``AsyncVectorEnv`` has two factors, shown as ``stepping x code``: how much faster our
``VectorEnv`` steps the suite's own code, and how much faster it is with the cheaper code.

Each variant is a process of its own; those of a table take turns. Also shown are the seconds from
the start of a variant to its first observations, the milliseconds of a reset of one environment,
and the memory of its processes (shared pages are divided among those that share them), in total and
per environment, less what the process took before it made them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.entrants import Entrant, of_module, started
from benchmarks.measuring import (
    alternate,
    end_on_sigterm,
    heading,
    parser_of,
    positive,
    program,
    report,
    results,
    say,
    spread,
    times_as_fast,
)
from benchmarks.steppers import Walk
from benchmarks.upstream import NAMED, names_of
from mtrl_lightning.envs.benchmarks.dm_control import DMC19, DMC21
from mtrl_lightning.envs.benchmarks.dm_families import FAMILIES
from mtrl_lightning.envs.vector.vector import usable_cores

KINDS = ("ours", "slow", "sync", "async")
ASYNC = "gymnasium async"
SUITES = {"metaworld": "MetaWorld"} | dict.fromkeys(["dm_control", *FAMILIES], "dm_control")
"""The suite whose code is stepped, by benchmark."""
SLOW = {suite: f" with {suite}'s code" for suite in SUITES.values()}
"""In the names of variants of ours that step the suite's own code."""
TASKS = {"metaworld": [1, 10, 25, 50], "dm_control": [1, 19, 21]} | {
    name: [len(family.train + family.interpolation + family.extrapolation)]
    for name, family in FAMILIES.items()
}
"""Numbers of tasks of the tables, the last one the largest, by benchmark."""


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("stepping", __doc__, repeats=5)
    add = parser.add_argument
    workers = list(dict.fromkeys([0, 1, 2, usable_cores()]))
    add(
        "--benchmark",
        choices=list(TASKS),
        default="metaworld",
        metavar="NAME",
        help=f"whose tasks: {', '.join(TASKS)} (default %(default)s)",
    )
    add(
        "--tasks",
        nargs="+",
        type=positive,
        help="numbers of tasks, each a table: up to 50 of MetaWorld, 21 of dm_control, all of a"
        " family (default 1 10 25 50, or 1 19 21, or 8)",
    )
    add(
        "--workers",
        nargs="+",
        type=int,
        default=workers,
        help="of ours, each a variant (default %(default)s)",
    )
    add(
        "--variants",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        help="slow is ours with the suite's own code and the last number of workers (default all)",
    )
    add(
        "--env_steps",
        type=positive,
        default=2_000,
        help="of a window, over all environments (default %(default)s)",
    )
    add(
        "--settle",
        type=int,
        default=20,
        help="vector steps before the first window (default %(default)s)",
    )
    options = parser.parse_args(args)
    numbers = TASKS[options.benchmark]
    options.tasks = options.tasks or numbers
    if not all(1 <= number <= max(numbers) for number in options.tasks):
        parser.error(f"--tasks takes numbers from 1 to {max(numbers)}")
    if options.benchmark in FAMILIES and options.tasks != numbers:
        parser.error(f"--tasks is {max(numbers)} for a family, all of its tasks")
    return options


def tasks_of(number: int, benchmark: str = "metaworld") -> list[str]:
    """Return a set of so many tasks, or names of that many; none for a family, which is whole."""
    if benchmark in FAMILIES:
        return []
    if benchmark == "dm_control":
        return ["DMC19"] if number == len(DMC19) else list(DMC21[:number])
    if number in NAMED:
        return [NAMED[number]]
    return list(names_of([NAMED[min(size for size in NAMED if size >= number)]])[:number])


def name_of(workers: int, slow: str = "") -> str:
    """Return the name of a variant of ours; ``slow`` says whose code it steps if not ours."""
    return f"ours{slow}, {workers} workers"


def entrants(number: int, steps: int, options: argparse.Namespace, folder: Path) -> list[Entrant]:
    """Return the variants of one table, not started yet."""
    walks: dict[str, Walk] = {}

    def add(name: str, kind: Any, workers: int = 0, fast: bool = True) -> None:
        tasks = tasks_of(number, options.benchmark)
        walks[name] = Walk(
            kind,
            tasks,
            workers,
            fast,
            steps,
            options.settle,
            benchmark=options.benchmark,
        )

    # no more workers than environments
    numbers = list(dict.fromkeys(min(workers, number) for workers in options.workers))
    for workers in numbers if "ours" in options.variants else []:
        add(name_of(workers), "ours", workers)
    if "slow" in options.variants:
        slow = SLOW[SUITES[options.benchmark]]
        add(name_of(numbers[-1], slow), "ours", numbers[-1], fast=False)
    for kind in ("sync", "async"):
        if kind in options.variants:
            add(f"gymnasium {kind}", kind)
    return [
        Entrant(name, walk.kind, of_module("steppers", asdict(walk)), folder)
        for name, walk in walks.items()
    ]


def compare(number: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Let the variants take turns; return one table's content."""
    say(f"{number} tasks")
    steps = max(5, options.env_steps // number)
    taking_part = entrants(number, steps, options, folder)
    with started(taking_part):
        seconds = alternate(
            {entrant.name: entrant.window for entrant in taking_part}, options.repeats
        )
    a_step = {name: [value / steps for value in values] for name, values in seconds.items()}
    rows = results(a_step, [name for name in ("gymnasium sync", ASYNC) if name in a_step])
    for row, entrant in zip(rows, taking_part, strict=True):
        row["env_steps_per_second"] = spread([number * 1e3 / value for value in row["rounds"]])
        row |= entrant.about
        row["gain_over_async"] = gain_over_async(row["variant"], a_step)
    return {"tasks": number, "steps": steps, "unit": "ms per vector step", "results": rows}


def gain_over_async(
    name: str, seconds: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, float]] | None:
    """Split how many times as fast as ``AsyncVectorEnv`` a variant of ours is into two factors.

    Args:
        name: of the variant.
        seconds: a vector step of each variant, by rounds.

    Returns:
        ``stepping``: times as fast as ``AsyncVectorEnv``, both with the suite's own code;
        ``code``: times as fast with the cheaper code as with the suite's. None if no variant steps
        the suite's own code with as many workers, or ``AsyncVectorEnv`` was not measured.
    """
    candidates = [name.replace("ours,", f"ours{suite},") for suite in SLOW.values()]
    slow = next((found for found in candidates if found in seconds), name)
    if slow == name or ASYNC not in seconds:
        return None
    return {
        "stepping": times_as_fast(seconds[slow], seconds[ASYNC]),
        "code": times_as_fast(seconds[name], seconds[slow]),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON's content."""
    with tempfile.TemporaryDirectory(prefix="stepping-") as folder:
        tables = [compare(number, options, Path(folder)) for number in options.tasks]
    return {
        **heading("stepping", options),
        "tables": tables,
    }


def split_shown(gain: Mapping[str, Mapping[str, float]] | None) -> str:
    """Return both factors of ``gain_over_async`` as text."""
    if gain is None:
        return "-"
    return f"{gain['stepping']['median']:.2f} x {gain['code']['median']:.2f}"


def text_of(content: dict[str, Any]) -> str:
    """Return the tables."""
    parts = []
    for found in content["tables"]:
        rows = [
            {
                **row,
                "stepping x code": split_shown(row["gain_over_async"]),
                "env steps/s": f"{row['env_steps_per_second']['median']:,.0f}",
                "s to build": f"{row['build_seconds']:.1f}",
                "ms a reset": f"{row['reset_seconds'] * 1e3 / found['tasks']:.1f}",
                "MiB": f"{row['memory_mib']:,.0f}",
                "MiB per environment": f"{row['memory_mib_per_env']:.1f}",
            }
            for row in found["results"]
        ]
        title = f"{found['tasks']} tasks, windows of {found['steps']} vector steps"
        columns = (
            "stepping x code",
            "env steps/s",
            "s to build",
            "ms a reset",
            "MiB",
            "MiB per environment",
        )
        parts.append(report(title, rows, found["unit"], columns))
    return "\n\n".join(parts)


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
