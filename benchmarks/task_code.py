"""Microseconds of a MetaWorld step outside of the physics: observation, reward, info, wrappers.

  ours                the faster environments
  MetaWorld's own     the same task with MetaWorld's code

Environments are paused at moments of an episode of the scripted policy, where MuJoCo's functions
are replaced by ones that do nothing, and are then stepped there. Times are of the processor, so
that other work on the same core does not count; both take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.measuring import (
    alternate,
    parse,
    parser_of,
    positive,
    program,
    ratios,
    say,
    spread,
)
from mtrl_lightning.envs import MetaWorld
from mtrl_lightning.errors import import_optional

FAST = {"MetaWorld's own": False, "ours": True}
"""Whether the environments of a variant are the faster ones."""
GRASPING = ["pick-place", "peg-insert-side", "push", "assembly", "basketball", "hammer"]
"""Tasks with a grasp, whose rewards take longest."""
PHYSICS = ("mj_step", "mj_forward", "mj_rnePostConstraint")
"""MuJoCo's functions that a step calls."""
STEPS_BETWEEN = 8
"""Steps of the episode between two moments: with 8 of them the last ones hold the object."""
SMALL = 0.3
"""Scale of the hand's motion at a moment, so that it is not clipped at the edge of its space."""


def options_of(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("task_code", __doc__, rounds=15)
    add = parser.add_argument
    text = "names of MetaWorld's tasks (default %(default)s)"
    add("--tasks", nargs="+", default=[*GRASPING, "bin-picking", "reach", "door-open"], help=text)
    text = "which environments (default both)"
    add("--variants", nargs="+", choices=list(FAST), default=list(FAST), help=text)
    add("--moments", type=positive, default=8, help="of an episode (default %(default)s)")
    add("--steps", type=positive, default=200, help="at each moment (default %(default)s)")
    return parse(parser, args)


def paused(name: str, fast: bool, moments: int) -> list[tuple[Any, Any]]:
    """Return environments at moments of an episode, each with an action.

    Args:
        name: of the task.
        fast: whether they are the faster ones.
        moments: how many.
    """
    benchmark = MetaWorld([name], num_goals=1, fast=fast)
    policies = import_optional("metaworld.policies", "metaworld").ENV_POLICY_MAP
    scenes = []
    for moment in range(moments):
        env = benchmark.make_env(0, "eval", 0)
        policy = policies[benchmark.task_names[0]]()
        observation, _ = env.reset(seed=0)
        for _ in range(1 + moment * STEPS_BETWEEN):
            action = _action(policy, observation)
            observation = env.step(action)[0]
        action = _action(policy, observation).clip(-1, 1)
        action[:3] *= SMALL
        scenes.append((env, action))
    return scenes


def _action(policy: Any, observation: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return policy.get_action(observation).astype(np.float32)


@contextmanager
def without_physics() -> Iterator[None]:
    """Replace MuJoCo's functions by ones that do nothing."""
    import mujoco

    kept = {name: getattr(mujoco, name) for name in PHYSICS}
    for name in PHYSICS:
        setattr(mujoco, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(mujoco, name, function)


def seconds_of(scenes: Sequence[tuple[Any, Any]], steps: int) -> float:
    """Return the processor's seconds of a step, the mean over all scenes."""
    total = 0.0
    for env, action in scenes:
        env.unwrapped.curr_path_length = 0
        start = time.process_time()
        for _ in range(steps):
            env.step(action)
        total += time.process_time() - start
    return total / (steps * len(scenes))


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a task."""
    say(name)
    scenes = {one: paused(name, FAST[one], options.moments) for one in options.variants}
    with without_physics():
        measures = {
            variant: lambda some=some: seconds_of(some, options.steps)
            for variant, some in scenes.items()
        }
        seconds = alternate(measures, options.rounds)
    row: dict[str, Any] = {"task": name}
    row |= {f"{one}, us": spread([1e6 * value for value in seconds[one]]) for one in seconds}
    if len(seconds) == len(FAST):
        row["times as fast"] = ratios(*(seconds[one] for one in FAST))
    return row


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the table."""
    rows = [compare(name, options) for name in options.tasks]
    return {"tables": [{"title": "processor time of a step without physics", "rows": rows}]}


main = program("task_code", options_of, measure)

if __name__ == "__main__":
    sys.exit(main())
