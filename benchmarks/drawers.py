"""The processes of ``benchmarks.rendering``: each draws a task in one way, a window at a time.

``python -m benchmarks.drawers OPTIONS`` is one of them; ``OPTIONS`` is JSON. A library keeps its
context in the process, so that two ways of drawing in one process would disturb each other.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from benchmarks.pacing import Pacer
from mtrl_lightning.envs.render.opengl import VARIABLE

KINDS = {"dm_control": "dm_control", "papers": "ours, as in papers", "ours": "ours"}
"""Names in the table."""


@dataclass
class Drawing:
    """What a process draws."""

    kind: str
    """One of ``KINDS``."""
    task: str
    """Of the DeepMind Control Suite, such as ``walker-walk``."""
    size: int
    """Pixels of an image's side."""
    renderer: str
    """Value of ``MUJOCO_GL``."""
    steps: int
    """Frames of a window."""
    settle: int
    """Frames before the first window."""
    descriptor: int = 1
    """Of the file that results are written to."""


def of_dm_control(drawing: Drawing) -> tuple[Any, Callable[[], npt.NDArray]]:
    """Return dm_control's simulation after its first reset, and what draws it."""
    os.environ[VARIABLE] = drawing.renderer  # dm_control reads it when it is imported
    from dm_control import suite

    from mtrl_lightning.envs.benchmarks.dm_control import CAMERAS

    domain, _, name = drawing.task.partition("-")
    environment: Any = suite.load(domain, name, task_kwargs={"random": 0})
    environment.reset()
    physics = environment.physics
    camera = CAMERAS.get(domain, 0)
    size = drawing.size
    return physics.data.ptr, lambda: physics.render(size, size, camera_id=camera)


def of_pixels(drawing: Drawing) -> tuple[Any, Callable[[], npt.NDArray]]:
    """Return our simulation of the same episode, and what draws it."""
    from mtrl_lightning.envs import DMControl, Pixels
    from mtrl_lightning.envs.render.drawing import Quality

    quality = Quality(*[drawing.kind == "papers"] * 3)
    benchmark = Pixels(DMControl([drawing.task]), drawing.size, **quality._asdict())
    env: Any = benchmark.make_env(0, "eval", seed=0)
    env.reset(seed=0)
    return env.unwrapped.data, env.draw


def main() -> None:
    """Draw until no further window is asked for; the simulation steps between two frames."""
    import mujoco

    drawing = Drawing(**json.loads(sys.argv[1]))
    make = of_dm_control if drawing.kind == "dm_control" else of_pixels
    data, draw = make(drawing)
    about: dict[str, Any] = {"image": draw().ravel().tolist()}
    pacer = Pacer(drawing.steps, drawing.settle, drawing.descriptor, about=about)
    while pacer.tick():
        mujoco.mj_step(data.model, data)
        draw()


if __name__ == "__main__":
    main()
