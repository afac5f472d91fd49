"""The programs that ``stepping`` compares, each a process that steps in windows (``pacing.py``).

``python -m benchmarks.steppers OPTIONS`` is one of them; ``OPTIONS`` is JSON.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from benchmarks import upstream, upstream_suite
from benchmarks.measuring import proportional_set_size
from benchmarks.pacing import Pacer
from mtrl_lightning.envs import DMControl, DMControlFamily, MetaWorld
from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.envs.benchmarks.dm_control import SuiteTasks
from mtrl_lightning.envs.benchmarks.dm_control_domains import import_suite
from mtrl_lightning.envs.vector.vector import VectorEnv
from mtrl_lightning.errors import import_optional

ACTIONS = 64
"""Random actions of a vector step that are used in turn."""


@dataclass
class Walk:
    """What is stepped, and how."""

    kind: Literal["ours", "sync", "async"]
    """``ours``, or Gymnasium's vector environment."""
    tasks: list[str]
    """A set such as ``MT10``, or names."""
    workers: int
    """Of ours."""
    fast: bool
    """Of ours: with our cheaper code for the benchmark, or with its own."""
    steps: int
    """Vector steps of a window."""
    settle: int
    """Vector steps before the first window."""
    descriptor: int = -1
    """Of the open file that the windows' seconds are written to."""
    benchmark: str = "metaworld"
    """``metaworld``, ``dm_control`` or one of its families."""


def make_suite(walk: Walk, fast: bool) -> SuiteTasks:
    """Return dm_control's tasks or a family."""
    if walk.benchmark == "dm_control":
        tasks: Any = walk.tasks[0] if len(walk.tasks) == 1 else walk.tasks
        return DMControl(tasks, action_repeat=1, fast=fast)
    return DMControlFamily(walk.benchmark, action_repeat=1, fast=fast)


def build(walk: Walk) -> tuple[gym.vector.VectorEnv, Callable[[Any], Any]]:
    """Return the environments, and what steps them."""
    is_metaworld = walk.benchmark == "metaworld"
    if walk.kind != "ours":
        if is_metaworld:
            theirs = upstream.make_vec(walk.tasks, walk.kind)
        else:
            theirs = upstream_suite.make_vec(make_suite(walk, fast=False), walk.kind)
        return theirs, theirs.step
    tasks: Any = walk.tasks[0] if len(walk.tasks) == 1 else walk.tasks
    benchmark: Benchmark
    benchmark = MetaWorld(tasks, fast=walk.fast) if is_metaworld else make_suite(walk, walk.fast)
    num_tasks = benchmark.spec.num_tasks
    envs = VectorEnv(benchmark, range(num_tasks), seed=1, num_workers=walk.workers)

    def step(action_EA: Any) -> Any:  # as a collector does
        envs.send(action_EA)
        return envs.receive()

    return envs, step


def main() -> None:
    """Step until no further window is asked for."""
    walk = Walk(**json.loads(sys.argv[1]))
    # its import belongs to no variant
    if walk.benchmark == "metaworld":
        import_optional("metaworld", "metaworld")
    else:
        import_suite()
    gym.logger.min_level = gym.logger.ERROR
    before = proportional_set_size()
    start = time.perf_counter()
    envs, step = build(walk)
    envs.reset(seed=1)
    about = {"build_seconds": time.perf_counter() - start}
    draws = np.random.default_rng(0)
    shape = (envs.num_envs, *envs.single_action_space.shape)  # type: ignore[misc]
    actions = itertools.cycle(
        [draws.uniform(-1, 1, shape).astype(np.float32) for _ in range(ACTIONS)]
    )
    step(next(actions))
    about["memory_mib"] = proportional_set_size()
    about["memory_mib_per_env"] = (about["memory_mib"] - before) / envs.num_envs
    start = time.perf_counter()
    envs.reset(seed=2)
    about["reset_seconds"] = time.perf_counter() - start
    pacer = Pacer(walk.steps, walk.settle, walk.descriptor, about=about)
    while pacer.tick():
        step(next(actions))
    envs.close()


if __name__ == "__main__":
    main()
