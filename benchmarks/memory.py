"""Memory of environments and of whole runs, and how fast environments are built.

  python -m benchmarks.memory                        MetaWorld's environments, in one process
  python -m benchmarks.memory --run fit -c FILE ...  the peak of a run, of all its processes

Memory is the proportional set size: pages that processes share are counted once. A run is measured
every half second, until it ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.measuring import (
    COMMAND,
    call_of,
    environment,
    parse,
    parser_of,
    positive,
    program,
    proportional_set_size,
    say,
)
from mtrl_lightning.envs import MetaWorld, VectorEnv

INTERVAL = 0.5
"""Seconds between two measurements of a run."""
STANDARD_ERROR = 2
"""Where a run prints, since standard output is the result's."""
FAST = {"ours": True, "MetaWorld's own": False}
"""Whether the environments of a variant are the faster ones."""


def options_of(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("memory", __doc__, rounds=None)
    add = parser.add_argument
    add("--tasks", default="MT10", help="a set of MetaWorld's tasks (default %(default)s)")
    add("--copies", type=positive, default=10, help="environments per task (default %(default)s)")
    text = "which environments (default both)"
    add("--variants", nargs="+", choices=list(FAST), default=list(FAST), help=text)
    text = "arguments of mtrl-lightning, whose processes are measured; the last option"
    add("--run", nargs=argparse.REMAINDER, metavar="ARGUMENT", help=text)
    return parse(parser, args)


def build(fast: bool, tasks: str, copies: int) -> None:
    """Build environments in this process, step each once, and print what they take as JSON.

    Args:
        fast: whether they are the faster ones.
        tasks: a set of MetaWorld's tasks, or the name of one.
        copies: environments per task.
    """
    benchmark = MetaWorld(tasks, fast=fast)
    tasks_E = [task for task in range(benchmark.spec.num_tasks) for _ in range(copies)]
    before = proportional_set_size()
    start = time.perf_counter()
    start_of_cpu = time.process_time()
    envs = VectorEnv(benchmark, tasks_E, seed=1, num_workers=0)
    envs.reset(seed=1)
    seconds = time.perf_counter() - start
    seconds_of_cpu = time.process_time() - start_of_cpu
    envs.step(envs.action_space.sample())
    memory = proportional_set_size() - before
    row = {
        "environments": len(tasks_E),
        "s": seconds,
        "s of processor": seconds_of_cpu,
        "built per s of processor": len(tasks_E) / seconds_of_cpu,
        "MiB per environment": memory / len(tasks_E),
    }
    print(json.dumps(row))


def built(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a variant, which builds its environments in a process of its own."""
    say(name)
    arguments = {"fast": FAST[name], "tasks": options.tasks, "copies": options.copies}
    printed = subprocess.check_output(call_of(build, arguments), env=environment(), text=True)
    return {"variant": name} | json.loads(printed.splitlines()[-1])


def peak_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the row of a run: the largest memory of all its processes together.

    Raises:
        subprocess.CalledProcessError: if the run fails.
    """
    command = [sys.executable, *COMMAND, *arguments]
    peak = shown = 0.0
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=STANDARD_ERROR, env=environment()) as process:
        while process.poll() is None:
            peak = max(peak, proportional_set_size(process.pid))
            if peak > 1.1 * shown:
                say(f"{peak:,.0f} MiB")
                shown = peak
            # more often at the start: a short run would have ended before its second look
            time.sleep(min(INTERVAL, 0.1 * (time.perf_counter() - start)))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    seconds = time.perf_counter() - start
    return {"run": " ".join(arguments), "peak MiB": peak, "s": seconds}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the table."""
    if options.run:
        return {"tables": [{"title": "a run", "rows": [peak_of(options.run)]}]}
    rows = [built(name, options) for name in options.variants]
    return {"tables": [{"title": f"{options.tasks}, {options.copies} copies", "rows": rows}]}


main = program("memory", options_of, measure)

if __name__ == "__main__":
    sys.exit(main())
