"""How much ``benchmarks.gpu`` measures on a GPU, and in a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pixels import Encoding

PROTOCOL = ("experiment/mtsac",)
TOY = ("base", "env/toy", "algorithm/mtsac", "encoder/identity", "network/mlp", "gradient/mean")
NARROW = {f"model.init_args.{name}.init_args.width": 8 for name in ("actor", "critic")}


class Shape(NamedTuple):
    """Sizes of an update."""

    name: str
    kind: str
    """Of ``benchmarks.updaters``: ``direct`` for SAC, ``ppo`` for PPO."""
    tasks: int
    batch_size: int
    width: int
    depth: int


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    shapes: tuple[Shape, ...]
    compile: tuple[str, ...]
    updates: int
    """Of a window with the first shape; fewer where one takes longer."""
    settle: int
    """Updates before the first window, in which losses are compiled and graphs recorded."""
    repeats: int
    gradient_options: tuple[str, ...]
    """Options of ``benchmarks.gradients``."""
    capacity: int
    """Transitions of the replay."""
    batches: tuple[tuple[int, int], ...]
    """Tasks, and rows of each, of the batches that are drawn."""
    calls: int
    """Draws in a round."""
    encodings: tuple[Encoding, ...]
    image_rows: tuple[int, ...]
    """Rows of each of ``pixels.NUM_TASKS`` in a batch of images."""
    image_width: int
    """Of the hidden layers behind the encoder."""
    image_capacity: int
    configs: tuple[str, ...]
    """Of whole runs."""
    run_options: Mapping[str, Any]
    """Further options of them."""
    run_updates: int
    """Updates of a window of a whole run."""


FULL = Sizes(
    shapes=(
        Shape("MT10, 3 x 400", "direct", 10, 1280, 400, 3),
        Shape("MT10, 3 x 1024", "direct", 10, 1280, 1024, 3),
        Shape("MT10, 3 x 4096", "direct", 10, 1280, 4096, 3),
        Shape("as the quickstart, 2 x 256", "direct", 3, 192, 256, 2),
        Shape("PPO on MT10, 3 x 400", "ppo", 10, 3200, 400, 3),
    ),
    compile=("none", "default", "cudagraphs"),
    updates=100,
    settle=20,
    repeats=3,
    gradient_options=("--tasks=10", "--updates=20", "--repeats=3"),
    capacity=1_000_000,
    batches=((10, 128), (50, 128)),
    calls=200,
    encodings=(Encoding("pixels", 84), Encoding("pixels_small", 64)),
    image_rows=(32, 128),
    image_width=1024,
    image_capacity=100_000,
    configs=PROTOCOL,
    run_options={"evaluation.envs_per_task": 10},
    run_updates=500,
)
DRY = Sizes(
    shapes=(
        Shape("SAC, 1 x 8", "direct", 2, 8, 8, 1),
        Shape("PPO, 1 x 8", "ppo", 2, 8, 8, 1),
    ),
    compile=("none",),
    updates=2,
    settle=1,
    repeats=1,
    gradient_options=(
        *("--tasks=2", "--rows=4", "--width=8", "--depth=1"),
        *("--updates=1", "--repeats=1"),
    ),
    capacity=40,
    batches=((2, 4),),
    calls=2,
    encodings=(Encoding("pixels_small", 32),),
    image_rows=(2,),
    image_width=8,
    image_capacity=40,
    configs=TOY,
    run_options={
        **NARROW,
        "data.batch_size": 12,
        "data.capacity": 3_000,
        "rollout.num_workers": 0,
        "rollout.learner_threads": 1,
        "evaluation.num_workers": 0,
        "evaluation.num_episodes": 1,
    },
    run_updates=5,
)


@dataclass(frozen=True)
class Setup:
    """What a part is given.

    Args:
        part: its name.
        folder: of what it writes.
        is_dry: whether it runs with tiny sizes on the CPU.
        minutes: of training.
        limit: seconds after which the part is ended.
    """

    part: str
    folder: str
    is_dry: bool
    minutes: float
    limit: float

    @property
    def sizes(self) -> Sizes:
        """How much is measured."""
        return DRY if self.is_dry else FULL

    @property
    def device(self) -> str:
        """Name of the device."""
        return "cpu" if self.is_dry else "cuda"

    @property
    def accelerator(self) -> str:
        """The device's name for Lightning's trainer."""
        return "cpu" if self.is_dry else "gpu"

    def path(self, name: str) -> Path:
        """Return the path of a file in the folder."""
        return Path(self.folder) / name
