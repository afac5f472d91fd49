"""How fast observed images are rendered, beside dm_control's physics.render.

  dm_control  physics.render as papers use it: shadows, reflections, several samples of a pixel
  papers      Pixels with all three, which has to render the same images
  ours        Pixels with its defaults: without them

Each variant is a process, since a library keeps its context in its process. The simulation steps
between two frames. Also shown: the mean difference of the first image's bytes from dm_control's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measuring import (
    Pacer,
    Program,
    Table,
    Variant,
    positive,
    rows_of,
    say,
    take_turns,
)
from mtrl_lightning.envs.render.opengl import VARIABLE, find_renderer

KINDS = ("dm_control", "papers", "ours")
TASKS = ("cartpole-swingup", "cheetah-run", "walker-walk")


def add_options(add: Callable[..., Any]) -> None:
    """Add the benchmark's own options."""
    add("--tasks", nargs="+", default=list(TASKS), help="each a table")
    add("--variants", nargs="+", choices=KINDS, default=list(KINDS), help="what takes turns")
    add("--size", type=positive, default=84, help="pixels of an image's side")
    add("--frames", type=positive, default=50, help="of a window")
    add("--settle", type=int, default=5, help="frames before the first window")


def _check(options: argparse.Namespace) -> None:
    options.renderer = find_renderer()


# ---- the process of a variant ----


def render_in_windows(
    kind: str, task: str, size: int, renderer: str, steps: int, settle: int
) -> None:
    """Render until no further window is requested; the function of a variant's process."""
    os.environ[VARIABLE] = renderer  # dm_control reads it when it is imported
    import mujoco

    if kind == "dm_control":
        from dm_control import suite

        from mtrl_lightning.envs.benchmarks.dm_control import CAMERAS

        domain, _, name = task.partition("-")
        env: Any = suite.load(domain, name, task_kwargs={"random": 0})
        env.reset()
        data = env.physics.data.ptr
        render = partial(env.physics.render, size, size, camera_id=CAMERAS.get(domain, 0))
    else:  # the same episode
        from mtrl_lightning.envs import DMControl, Pixels
        from mtrl_lightning.envs.render.renderer import Quality

        quality = Quality(*[kind == "papers"] * 3)
        env = Pixels(DMControl([task]), size, **quality._asdict()).make_env(0, "eval", seed=0)
        env.reset(seed=0)
        data = env.unwrapped.data
        render = env.draw
    pacer = Pacer(steps, settle, about={"image": render().copy()})
    while pacer.tick():
        mujoco.mj_step(data.model, data)
        render()


# ---- the comparison ----


def compare(task: str, options: argparse.Namespace) -> Table:
    """Let the variants take turns; return a table."""
    say(task)
    shared = {
        "task": task,
        "size": options.size,
        "renderer": options.renderer,
        "steps": options.frames,
        "settle": options.settle,
    }
    variants = [Variant(kind, render_in_windows, kind=kind, **shared) for kind in options.variants]
    seconds = take_turns(variants, options.rounds, options.frames)
    images = {one.name: one.about["image"].astype(int) for one in variants}
    rows = rows_of(seconds, ["dm_control"], rate="frames/s")
    for row in rows:
        if "dm_control" in images:
            difference = np.abs(images[row["variant"]] - images["dm_control"])
            row["mean difference of 255"] = float(difference.mean())
    renderer = options.renderer or "own library"
    title = f"{task}: ms per frame of {options.size} x {options.size}, {renderer}"
    return Table(title, rows)


def measure(options: argparse.Namespace) -> list[Table]:
    """Return the tables."""
    return [compare(task, options) for task in options.tasks]


program = Program("rendering", __doc__, add_options, measure, _check)
options_of = program.options_of
main = program.main

if __name__ == "__main__":
    main()
