"""How fast observed images are drawn, beside dm_control's ``physics.render``.

``python -m benchmarks.rendering`` draws tasks of the DeepMind Control Suite in three ways:

  dm_control          ``physics.render`` as papers use it: with shadows, reflections and several
                      samples of a pixel
  ours, as in papers  ``Pixels`` with all three, which shall draw the same images
  ours                ``Pixels`` with its defaults: without them

Each is a process of its own; those of a table take turns. The simulation steps between two frames.
Also shown is the mean difference of the first image's bytes from those of dm_control. ``ours``
shall draw at least 8 times as many frames per second as dm_control.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.drawers import KINDS, Drawing
from benchmarks.entrants import Entrant, of_module, started
from benchmarks.measuring import (
    alternate,
    end_on_sigterm,
    heading,
    parser_of,
    positive,
    program,
    refusing,
    report,
    results,
    say,
    spread,
)
from mtrl_lightning.envs.render.opengl import find_renderer

TASKS = ("cartpole-swingup", "cheetah-run", "walker-walk")
DM_CONTROL = KINDS["dm_control"]
WANTED = 8.0
"""Times as many frames per second as dm_control that ours shall draw."""
ENLARGED = 3
"""Pixels of a side in the image file for each pixel that is observed."""


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("rendering", __doc__, repeats=5)
    add = parser.add_argument
    add("--tasks", nargs="+", default=list(TASKS), help="each a table (default %(default)s)")
    add("--variants", nargs="+", choices=list(KINDS), default=list(KINDS), help="(default all)")
    add("--size", type=positive, default=84, help="of an image's side (default %(default)s)")
    add("--frames", type=positive, default=50, help="of a window (default %(default)s)")
    add("--settle", type=int, default=5, help="before the first window (default %(default)s)")
    add(
        "--image",
        type=Path,
        metavar="FILE",
        help="also write the first images of the last task side by side",
    )
    options = parser.parse_args(args)
    with refusing(parser):
        options.renderer = find_renderer()
    return options


def compare(task: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Let the variants take turns; return one table's content."""
    say(task)
    entrants = []
    for kind in options.variants:
        drawing = Drawing(
            kind, task, options.size, options.renderer, options.frames, options.settle
        )
        entrants.append(Entrant(KINDS[kind], kind, of_module("drawers", asdict(drawing)), folder))
    with started(entrants):
        seconds = alternate({one.name: one.window for one in entrants}, options.repeats)
    shape = (options.size, options.size, 3)
    images = {one.name: np.reshape(one.about["image"], shape) for one in entrants}
    a_frame = {name: [value / options.frames for value in found] for name, found in seconds.items()}
    rows = results(a_frame, [DM_CONTROL] if DM_CONTROL in a_frame else [])
    for row in rows:
        row["frames_per_second"] = spread([1e3 / value for value in row["rounds"]])
        if DM_CONTROL in images:
            difference = np.abs(images[row["variant"]] - images[DM_CONTROL])
            row["difference"] = float(difference.mean())
    if options.image is not None and task == options.tasks[-1]:
        write_image(options.image, list(images.values()))
    return {"task": task, "unit": "ms", "results": rows}


def write_image(path: Path, images: Sequence[npt.NDArray]) -> None:
    """Write images side by side, enlarged."""
    from PIL import Image

    gap = np.full((images[0].shape[0], 4, 3), 255)
    joined = np.concatenate([part for image in images for part in (gap, image)][1:], axis=1)
    large = joined.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)
    Image.fromarray(large.astype(np.uint8)).save(path, optimize=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON's content."""
    with tempfile.TemporaryDirectory(prefix="rendering-") as folder:
        tables = [compare(task, options, Path(folder)) for task in options.tasks]
    return {**heading("rendering", options), "wanted_times_as_fast": WANTED, "tables": tables}


def text_of(content: dict[str, Any]) -> str:
    """Return the tables."""
    settings = content["settings"]
    parts = []
    for found in content["tables"]:
        rows = []
        for row in found["results"]:
            shown = {"frames/s": f"{row['frames_per_second']['median']:,.0f}"}
            if "difference" in row:
                shown["mean difference"] = f"{row['difference']:.2f} of 255"
            rows.append({**row, **shown})
        size = settings["size"]
        title = f"{found['task']}, {size} x {size}, {settings['renderer'] or 'own library'}"
        parts.append(report(title, rows, found["unit"], ("frames/s", "mean difference")))
    return "\n\n".join(parts)


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
