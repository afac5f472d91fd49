"""How fast a suite's environments are stepped, beside Gymnasium's vector ones and EnvPool's.

  ours       our VectorEnv with several numbers of workers (0: in the learner's process)
  original   the same with the suite's own code in place of our faster code
  sync       gymnasium.make_vec of MetaWorld, or SyncVectorEnv of Shimmy's wrapper of dm_control
  async      likewise, each environment in a process of its own
  envpool    EnvPool's MetaWorld in C++, a pool for each task (pip install envpool); not by default

All step random actions with the same protocol (MetaWorld: reward v2, horizon 500, 50 goals per
task; dm_control: horizon 1000, no action repeat). Each variant is a process. "stepping" and "code"
split the gain over async: by our VectorEnv with the suite's own code, and by our faster code.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.environments import (
    NAMED,
    EnvPoolTasks,
    metaworld_vector,
    names_of,
    suite_vector,
)
from benchmarks.measuring import (
    Pacer,
    Variant,
    call_of,
    parse,
    parser_of,
    positive,
    program,
    proportional_set_size,
    ratios,
    rows_of,
    say,
    take_turns,
)
from mtrl_lightning.envs import DMControl, DMControlFamily, MetaWorld
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.envs.benchmarks.dm_control import DMC19, DMC21, SuiteTasks
from mtrl_lightning.envs.benchmarks.dm_control_domains import import_suite
from mtrl_lightning.envs.benchmarks.dm_families import FAMILIES
from mtrl_lightning.envs.vector.vector import VectorEnv, usable_cores
from mtrl_lightning.errors import ConfigurationError, import_optional

KINDS = ("ours", "original", "sync", "async", "envpool")
SYNC = "gymnasium sync"
ASYNC = "gymnasium async"
ENVPOOL = "envpool"
TASKS = {"metaworld": [1, 10, 25, 50], "dm_control": [1, 19, 21]} | {
    name: [len(family.train + family.interpolation + family.extrapolation)]
    for name, family in FAMILIES.items()
}
"""Numbers of tasks of the tables, the last one the largest, by benchmark."""
ACTIONS = 64
"""Random actions of a vector step that are used in turn."""


def options_of(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("stepping", __doc__)
    add = parser.add_argument
    text = f"{', '.join(TASKS)} (default %(default)s)"
    add("--benchmark", choices=list(TASKS), default="metaworld", metavar="NAME", help=text)
    text = "numbers of tasks, each a table (default 1 10 25 50, or 1 19 21, or all of a family)"
    add("--tasks", nargs="+", type=positive, help=text)
    workers = list(dict.fromkeys([0, 1, 2, usable_cores()]))
    text = "of ours, each a variant; original has the last (default %(default)s)"
    add("--workers", nargs="+", type=int, default=workers, help=text)
    add(
        "--variants",
        nargs="+",
        choices=KINDS,
        default=list(KINDS[:-1]),
        help="(default all but envpool)",
    )
    text = "of a window, over all environments (default %(default)s)"
    add("--env_steps", type=positive, default=2_000, help=text)
    text = "vector steps before the first window (default %(default)s)"
    add("--settle", type=int, default=20, help=text)
    return parse(parser, args, _check)


def _check(options: argparse.Namespace) -> None:
    numbers = TASKS[options.benchmark]
    options.tasks = options.tasks or numbers
    if max(options.tasks) > max(numbers):
        raise ConfigurationError(f"--tasks takes numbers from 1 to {max(numbers)}")
    if "envpool" in options.variants:
        if options.benchmark != "metaworld":
            raise ConfigurationError("--variants envpool is for --benchmark metaworld")
        import_optional("envpool", "envpool", "leave it out with --variants ours async")
    if options.benchmark in FAMILIES and options.tasks != numbers:
        raise ConfigurationError(f"--tasks is {max(numbers)} for a family, all of its tasks")


def tasks_of(number: int, benchmark: str = "metaworld") -> list[str]:
    """Return a set of so many tasks, or names of that many; none for a family, which is whole."""
    if benchmark in FAMILIES:
        return []
    if benchmark == "dm_control":
        return ["DMC19"] if number == len(DMC19) else list(DMC21[:number])
    if number in NAMED:
        return [NAMED[number]]
    return list(names_of([NAMED[min(size for size in NAMED if size >= number)]])[:number])


# ---- the process of a variant ----


def step_in_windows(
    kind: str, benchmark: str, tasks: list[str], workers: int, steps: int, settle: int
) -> None:
    """Step until no further window is requested; the function of a variant's process."""
    if benchmark == "metaworld":  # its import belongs to no variant
        import_optional("metaworld", "metaworld")
    else:
        import_suite()
    gym.logger.min_level = gym.logger.ERROR
    before = proportional_set_size()
    start = time.perf_counter()
    envs, step = build(kind, benchmark, tasks, workers)
    envs.reset(seed=1)
    about = {"s to build": time.perf_counter() - start}
    generator = np.random.default_rng(0)
    shape = (envs.num_envs, *envs.single_action_space.shape)
    recorded = [generator.uniform(-1, 1, shape).astype(np.float32) for _ in range(ACTIONS)]
    actions = itertools.cycle(recorded)
    step(next(actions))
    memory = proportional_set_size()
    start = time.perf_counter()
    envs.reset(seed=2)
    about["ms per reset"] = (time.perf_counter() - start) * 1e3 / envs.num_envs
    about["MiB"] = memory
    about["MiB per environment"] = (memory - before) / envs.num_envs
    pacer = Pacer(steps, settle, about=about)
    while pacer.tick():
        step(next(actions))
    envs.close()


def build(
    kind: str, benchmark: str, tasks: list[str], workers: int
) -> tuple[Any, Callable[[Any], Any]]:
    """Return the environments of a variant, and the function that steps them."""
    if kind == "envpool":
        pools = EnvPoolTasks(tasks)
        return pools, pools.step
    if kind in ("sync", "async"):
        strategy: Any = kind
        if benchmark == "metaworld":
            theirs = metaworld_vector(tasks, strategy)
        else:
            theirs = suite_vector(make_suite(benchmark, tasks, is_fast=False), strategy)
        return theirs, theirs.step
    made: Benchmark
    if benchmark == "metaworld":
        names: Any = tasks[0] if len(tasks) == 1 else tasks
        made = MetaWorld(names, fast=kind == "ours")
    else:
        made = make_suite(benchmark, tasks, is_fast=kind == "ours")
    envs = VectorEnv(made, range(made.spec.num_tasks), seed=1, num_workers=workers)

    def step(action_EA: Any) -> Any:  # as a collector does
        envs.send(action_EA)
        return envs.receive()

    return envs, step


def make_suite(benchmark: str, tasks: list[str], is_fast: bool) -> SuiteTasks:
    """Return dm_control's tasks or a family, without action repeat."""
    if benchmark == "dm_control":
        names: Any = tasks[0] if len(tasks) == 1 else tasks
        return DMControl(names, action_repeat=1, fast=is_fast)
    return DMControlFamily(benchmark, action_repeat=1, fast=is_fast)


# ---- the comparison ----


def variants_of(
    number: int, steps: int, options: argparse.Namespace, folder: Path
) -> list[Variant]:
    """Return the variants of a table, not started yet."""
    workers = list(dict.fromkeys(min(value, number) for value in options.workers))
    kinds: dict[str, tuple[str, int]] = {}
    if "ours" in options.variants:
        kinds |= {f"ours, {value} workers": ("ours", value) for value in workers}
    if "original" in options.variants:
        kinds[f"original, {workers[-1]} workers"] = ("original", workers[-1])
    kinds |= {f"gymnasium {k}": (k, 0) for k in ("sync", "async") if k in options.variants}
    kinds |= {ENVPOOL: ("envpool", 0)} if "envpool" in options.variants else {}
    shared = {
        "benchmark": options.benchmark,
        "tasks": tasks_of(number, options.benchmark),
        "steps": steps,
        "settle": options.settle,
    }
    return [
        Variant(name, call_of(step_in_windows, {"kind": kind, "workers": value, **shared}), folder)
        for name, (kind, value) in kinds.items()
    ]


def compare(number: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Let the variants take turns; return a table."""
    say(f"{number} tasks")
    steps = max(5, options.env_steps // number)
    variants = variants_of(number, steps, options, folder)
    seconds = take_turns(variants, options.rounds, steps)
    rows = rows_of(seconds, [SYNC, ASYNC, ENVPOOL], rate="env steps/s", amount=number)
    for row, variant in zip(rows, variants, strict=True):
        row |= split_gain(variant.name, seconds)
        row |= variant.about
    title = f"{options.benchmark}, {number} tasks, windows of {steps} vector steps"
    return {"title": title, "rows": rows}


def split_gain(name: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Split how many times as fast as ``AsyncVectorEnv`` a variant of ours is into two factors.

    Args:
        name: of the variant.
        seconds: of a vector step of each variant, by rounds.

    Returns:
        ``stepping``: times as fast as ``AsyncVectorEnv``, both with the suite's own code;
        ``code``: times as fast with our code as with the suite's. Nothing if no variant steps the
        suite's own code with as many workers, or ``AsyncVectorEnv`` was not measured.
    """
    original = name.replace("ours", "original")
    if original == name or original not in seconds or ASYNC not in seconds:
        return {}
    return {
        "stepping": ratios(seconds[ASYNC], seconds[original]),
        "code": ratios(seconds[original], seconds[name]),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the tables."""
    with tempfile.TemporaryDirectory(prefix="stepping-") as folder:
        return {"tables": [compare(number, options, Path(folder)) for number in options.tasks]}


main = program("stepping", options_of, measure)

if __name__ == "__main__":
    sys.exit(main())
