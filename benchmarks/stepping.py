"""How fast environments are built and stepped, and their memory, compared with Gymnasium's.

  ours       our VectorEnv with several numbers of workers (0: in the learner's process)
  original   the same with the suite's own code instead of our faster code
  sync       gymnasium.make_vec of MetaWorld, or SyncVectorEnv of Shimmy's wrapper of dm_control
  async      likewise, each environment in a process of its own

All step random actions with the same protocol (MetaWorld: reward v2, horizon 500, 50 goals per
task; dm_control: horizon 1000, no action repeat). Each variant is a process. "stepping" and "code"
split the gain over async: by our VectorEnv with the suite's own code, and by our faster code.
Memory is the proportional set size: pages that processes share are counted once.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.environments import NAMED, metaworld_vector, names_of, suite_vector
from benchmarks.measuring import (
    Pacer,
    Table,
    Variant,
    parser_of,
    positive,
    proportional_set_size,
    ratios,
    rows_of,
    run,
    say,
    take_turns,
)
from mtrl_lightning.envs import DMControl, DMControlFamily, MetaWorld
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.envs.benchmarks.dm_control import DMC19, DMC21, SuiteTasks
from mtrl_lightning.envs.benchmarks.dm_control_domains import import_suite
from mtrl_lightning.envs.benchmarks.dm_families import FAMILIES
from mtrl_lightning.envs.vector.vector import VectorEnv
from mtrl_lightning.errors import ConfigurationError, import_optional
from mtrl_lightning.utils.cores import usable_cores

KINDS = ("ours", "original", "sync", "async")
SYNC = "gymnasium sync"
ASYNC = "gymnasium async"
TASKS = {"metaworld": [1, 10, 25, 50], "dm_control": [1, 19, 21]} | {
    name: [len(family.train + family.interpolation + family.extrapolation)]
    for name, family in FAMILIES.items()
}
"""Numbers of tasks of the tables, the last one the largest, by benchmark."""
ACTIONS = 64
"""Random actions of a vector step that are used in turn."""


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
    kind: str,
    benchmark: str,
    tasks: list[str],
    envs_per_task: int,
    workers: int,
    steps: int,
    settle: int,
) -> None:
    """Step until no further window is requested; the function of a variant's process."""
    if benchmark == "metaworld":  # its import belongs to no variant
        import_optional("metaworld", "metaworld")
    else:
        import_suite()
    gym.logger.min_level = gym.logger.ERROR
    before = proportional_set_size()
    start = time.perf_counter()
    start_of_cpu = time.process_time()
    envs, step = build(kind, benchmark, tasks, workers, envs_per_task)
    envs.reset(seed=1)
    about = {"s to build": time.perf_counter() - start}
    if workers == 0 and kind != "async":  # otherwise other processes build
        about["s of processor to build"] = time.process_time() - start_of_cpu
        about["built per s of processor"] = envs.num_envs / about["s of processor to build"]
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
    kind: str, benchmark: str, tasks: list[str], workers: int, envs_per_task: int = 1
) -> tuple[Any, Callable[[Any], Any]]:
    """Return the environments of a variant, and the function that steps them."""
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
    tasks_E = [task for task in range(made.spec.num_tasks) for _ in range(envs_per_task)]
    envs = VectorEnv(made, tasks_E, seed=1, num_workers=workers)

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


def variants_of(number: int, steps: int, options: argparse.Namespace) -> list[Variant]:
    """Return the variants of a table, not started yet."""
    workers = list(dict.fromkeys(min(value, number) for value in options.workers))
    kinds: dict[str, tuple[str, int]] = {}
    if "ours" in options.variants:
        kinds |= {f"ours, {value} workers": ("ours", value) for value in workers}
    if "original" in options.variants:
        kinds[f"original, {workers[-1]} workers"] = ("original", workers[-1])
    kinds |= {f"gymnasium {k}": (k, 0) for k in ("sync", "async") if k in options.variants}
    shared = {
        "benchmark": options.benchmark,
        "tasks": tasks_of(number, options.benchmark),
        "envs_per_task": options.envs_per_task,
        "steps": steps,
        "settle": options.settle,
    }
    return [
        Variant(name, step_in_windows, kind=kind, workers=value, **shared)
        for name, (kind, value) in kinds.items()
    ]


def compare(number: int, options: argparse.Namespace) -> Table:
    """Let the variants take turns; return a table."""
    say(f"{number} tasks")
    num_envs = number * options.envs_per_task
    steps = max(5, options.env_steps // num_envs)
    variants = variants_of(number, steps, options)
    seconds = take_turns(variants, options.rounds, steps)
    rows = rows_of(seconds, [SYNC, ASYNC], rate="env steps/s", amount=num_envs)
    for row, variant in zip(rows, variants, strict=True):
        original = variant.name.replace("ours", "original")
        if original != variant.name and {original, ASYNC} <= seconds.keys():
            # the two factors of its speed relative to AsyncVectorEnv
            row["stepping"] = ratios(seconds[ASYNC], seconds[original])
            row["code"] = ratios(seconds[original], seconds[variant.name])
        row |= variant.about
    title = f"{options.benchmark}, {number} tasks, {num_envs} environments"
    return Table(f"{title}, windows of {steps} vector steps", rows)


def measure(options: argparse.Namespace) -> list[Table]:
    """Return the tables."""
    numbers = TASKS[options.benchmark]
    options.tasks = options.tasks or numbers
    if max(options.tasks) > max(numbers):
        raise ConfigurationError(f"--tasks takes numbers from 1 to {max(numbers)}")
    if options.benchmark in FAMILIES and options.tasks != numbers:
        raise ConfigurationError(f"--tasks is {max(numbers)} for a family, all of its tasks")
    if options.envs_per_task > 1 and not {*options.variants} <= {"ours", "original"}:
        raise ConfigurationError("--envs_per_task is for --variants ours original")
    return [compare(number, options) for number in options.tasks]


def main(args: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = parser_of("stepping", __doc__)
    add = parser.add_argument
    workers = list(dict.fromkeys([0, 1, 2, usable_cores()]))
    add("--benchmark", choices=list(TASKS), default="metaworld", help="whose tasks are stepped")
    text = "numbers of tasks, each a table; None: 1 10 25 50, or 1 19 21, or all of a family"
    add("--tasks", nargs="+", type=positive, help=text)
    add("--envs_per_task", type=positive, default=1, help="of ours and original")
    text = "of ours, each a variant; original has the last"
    add("--workers", nargs="+", type=int, default=workers, help=text)
    add("--variants", nargs="+", choices=KINDS, default=list(KINDS), help="what takes turns")
    add("--env_steps", type=positive, default=2_000, help="of a window, over all environments")
    add("--settle", type=int, default=20, help="vector steps before the first window")
    run(parser, args, measure)


if __name__ == "__main__":
    main()
