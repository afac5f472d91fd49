"""The parts of ``benchmarks.gpu``, each a process of its own.

``python -m benchmarks.gpu_parts OPTIONS`` is one of them; ``OPTIONS`` is JSON. A part measures with
the sizes of a GPU, or with tiny ones in a dry run, and writes what it finds into a ``Sheet``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils.data import DataLoader

from benchmarks import gradients
from benchmarks.entrants import Entrant, of_command_line, of_module
from benchmarks.gpu_sheet import Sheet, read_sheet
from benchmarks.measuring import (
    PRECISIONS,
    REPOSITORY,
    START_TIME,
    alternate,
    end_on_sigterm,
    environment,
    say,
    slow_bfloat16,
    spread,
)
from benchmarks.replay import timed
from benchmarks.replays import vector_step
from benchmarks.trial import COMMAND
from benchmarks.updaters import Work, direct_update, options_of
from mtrl_lightning.algorithms import SAC, RandomShift
from mtrl_lightning.memory import CPU, keep_freed_memory
from mtrl_lightning.networks import MLP, PixelEncoder
from mtrl_lightning.replay import ReplayBuffer, ReplayDataset
from mtrl_lightning.reports.metrics_file import METRICS, Curve, read_metrics
from mtrl_lightning.types import EnvSpec, TransitionBatch, Transitions

NEVER = 10**12
START_LIMIT = 150.0
"""Seconds to wait for a process' start-up, and for each of its windows."""
LAST_START = 0.7
"""Share of a part's time after which no further round is started."""
RESERVE = 30.0
"""Seconds at the end of a part's time in which it reads what a command has found."""
HINTS = "perf_hints,recompiles,graph_breaks"
"""What PyTorch prints about compiled functions, a value of ``TORCH_LOGS``."""
SKIPPED = "skipping cudagraphs"
MIB = 1 << 20
TARGET = 20_000_000
"""Environment steps of the MetaWorld+ protocol on MT10, which the projection is made for."""
PROTOCOL = ("experiment/mt10_mtsac",)
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


class Encoding(NamedTuple):
    """A way of encoding pictures."""

    name: str
    strides: tuple[int, ...]
    size: int
    """Pixels of a picture's side."""
    channels_last: bool


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
    picture_rows: tuple[int, ...]
    """Rows of each of ``PICTURE_TASKS`` in a batch of pictures."""
    picture_width: int
    """Of the hidden layers behind the encoder."""
    picture_capacity: int
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
    encodings=tuple(
        Encoding(name, strides, size, channels_last)
        for name, strides, size in (
            ("encoder/pixels", (2, 1, 1, 1), 84),
            ("encoder/pixels_small", (2, 2, 1, 1), 64),
        )
        for channels_last in (False, True)
    ),
    picture_rows=(32, 128),
    picture_width=1024,
    picture_capacity=100_000,
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
    encodings=(Encoding("encoder/pixels_small", (2, 2, 1, 1), 32, True),),
    picture_rows=(2,),
    picture_width=8,
    picture_capacity=40,
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
PICTURE_TASKS = 4


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


# ---- tests ----


def tests(setup: Setup, sheet: Sheet) -> None:
    """Run the tests that need a GPU: those with the marker ``cuda``."""
    files = marked_files(REPOSITORY / "tests")
    results = setup.path("tests.xml")
    results.unlink(missing_ok=True)
    options = ["-m", "cuda", "-p", "no:cacheprovider", "-n", "0", f"--junitxml={results}"]
    command = [sys.executable, "-m", "pytest", *map(str, files), *options]
    log = setup.path("tests.log")
    returncode = printing_to(log, command, setup)
    if not results.is_file():
        sheet.failure("pytest", log.read_text())
        return
    note_tests(results, sheet)
    if returncode not in (0, 1):  # 1: a test failed, which is noted already
        sheet.failure(f"pytest ended with {returncode}", log.read_text())


def printing_to(log: Path, command: Sequence[str], setup: Setup) -> int | None:
    """Run a command that prints to a file; return its exit code, None if its time was over."""
    limit = setup.limit - min(RESERVE, 0.3 * setup.limit)
    with log.open("wb") as output:
        try:
            ended = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environment(),
                stdout=output,
                stderr=output,
                check=False,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            output.write(f"\nended after {limit:.0f} s\n".encode())
            return None
    return ended.returncode


def marked_files(folder: Path) -> list[Path]:
    """Return the files with tests that have the marker ``cuda``: collecting all takes long."""
    return [path for path in sorted(folder.rglob("test_*.py")) if "mark.cuda" in path.read_text()]


def note_tests(results: Path, sheet: Sheet) -> None:
    """Note the results that pytest has written, a row for each file.

    Args:
        results: XML file in JUnit's format.
        sheet: to write to.
    """
    rows: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        name = case.get("classname", "")
        row = rows.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        wrong = [child for child in case if child.tag in ("failure", "error")]
        is_skipped = case.find("skipped") is not None
        row["failed" if wrong else "skipped" if is_skipped else "passed"] += 1
        row["seconds"] += float(case.get("time", 0))
        for child in wrong:
            sheet.failure(f"{name}::{case.get('name')}", child.text or child.get("message") or "")
    for name, row in rows.items():
        sheet.row("tests that need a GPU", file=name, **row)


# ---- updates ----


def updates(setup: Setup, sheet: Sheet) -> None:
    """Measure one update, on the GPU and beside it on the CPU."""
    for shape in setup.sizes.shapes:
        say(f"updates of {shape.name}")
        with sheet.trying(shape.name):
            measure_shape(shape, setup, sheet)
    note_skipped(setup.path("updates"), sheet)


def measure_shape(shape: Shape, setup: Setup, sheet: Sheet) -> None:
    """Let the variants of a shape take turns, and note a row for each."""
    works = works_of(shape, setup)
    folder = setup.path("updates")
    folder.mkdir(exist_ok=True)
    entrants = {
        name: Entrant(
            f"{shape.name} {name}",
            kind,
            of_module("updaters", options_of(work, kind)),
            folder,
            START_LIMIT,
        )
        for name, (kind, work) in works.items()
    }
    with ready(entrants, sheet) as able:
        seconds = windows_of(able, setup, sheet)
        memory = {name: able[name].memory() for name in seconds}
        for name, values in seconds.items():
            _, work = works[name]
            milliseconds = spread([value / work.steps * 1e3 for value in values])
            eager = f"{setup.device} {shape.kind} {work.precision}"
            reference = seconds.get(eager)
            gain = None
            if reference is not None and work.device == setup.device:
                per_update = np.median(reference) / works[eager][1].steps * 1e3
                gain = float(per_update / milliseconds["median"])
            sheet.row(
                f"ms per update: {shape.name}, batch {shape.batch_size}",
                variant=name,
                ms=milliseconds["median"],
                smallest=milliseconds["min"],
                largest=milliseconds["max"],
                per_second=1e3 / milliseconds["median"],
                times_eager=gain,
                start_up_s=able[name].ready_seconds,
                host_mib=memory[name],
            )


def works_of(shape: Shape, setup: Setup) -> dict[str, tuple[str, Work]]:
    """Return what is compared, as kind and work by name."""
    sizes = setup.sizes
    first = sizes.shapes[0]
    # a GPU has room for more than the first shape, so that its time grows more slowly
    share = min(1.0, 30 * _cost(first) / _cost(shape))

    def work(device: str, precision: str, how: str) -> Work:
        steps = max(2, round(share * sizes.updates))
        settle = sizes.settle
        if device == "cpu" and not setup.is_dry:
            steps = max(2, round(0.05 * share * sizes.updates))
            settle = 2
        return Work(
            tasks=shape.tasks,
            batch_size=shape.batch_size,
            width=shape.width,
            depth=shape.depth,
            precision=precision,
            compile=how,
            device=device,
            threads=1 if setup.is_dry else None,
            steps=steps,
            settle=settle,
        )

    found = {}
    # a dry run starts one process for each shape: starting them takes nearly all of its time
    precisions = [PRECISIONS[shape is not first]] if setup.is_dry else PRECISIONS
    for precision, how in itertools.product(precisions, sizes.compile):
        suffix = "" if how == "none" else f", compile {how}"
        name = f"{setup.device} {shape.kind} {precision}{suffix}"
        found[name] = (shape.kind, work(setup.device, precision, how))
    if setup.is_dry:
        return found
    if shape is first:
        for kind in ("trainer", "plain"):
            for precision in PRECISIONS:
                name = f"{setup.device} {kind} {precision}"
                found[name] = (kind, work(setup.device, precision, "none"))
    for precision in PRECISIONS:
        if precision == "32-true" or slow_bfloat16("cpu") is None:
            found[f"cpu {shape.kind} {precision}"] = (shape.kind, work("cpu", precision, "none"))
    return found


def _cost(shape: Shape) -> float:
    """Return what a network's pass multiplies, roughly."""
    return shape.batch_size * shape.width**2 * shape.depth


@contextlib.contextmanager
def ready(entrants: Mapping[str, Entrant], sheet: Sheet) -> Iterator[dict[str, Entrant]]:
    """Start processes side by side, and end them; those that fail are noted and left out."""
    at_once = max(1, min(len(entrants), (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(at_once) as pool, contextlib.ExitStack() as stack:
        for entrant in entrants.values():  # ended before the pool, whose threads wait for them
            stack.callback(entrant.close)
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        starts = {name: pool.submit(entrant.start) for name, entrant in entrants.items()}
        able = {}
        for name, start in starts.items():
            error = start.exception()
            if error is None:
                able[name] = entrants[name]
            else:
                sheet.failure(entrants[name].name, str(error))
        yield able


def windows_of(
    entrants: Mapping[str, Entrant], setup: Setup, sheet: Sheet
) -> dict[str, list[float]]:
    """Return the seconds of windows in turn; a process that fails is noted and left out."""
    repeats = setup.sizes.repeats
    found: dict[str, list[float]] = {name: [] for name in entrants}
    for k in range(repeats):
        if k > 0 and time.monotonic() - START_TIME > LAST_START * setup.limit:
            sheet.note(f"{k} of {repeats} rounds: the time is over")
            break
        for name in list(found):
            try:
                found[name].append(entrants[name].window())
            except RuntimeError as error:
                sheet.failure(entrants[name].name, str(error))
                del found[name]
    return found


# ---- gradient methods ----


def gradient_methods(setup: Setup, sheet: Sheet) -> None:
    """Measure an update with every gradient method, each beside the mean."""
    methods = [name for name in gradients.METHODS if name != "mean"]
    options = [f"--device={setup.device}", *setup.sizes.gradient_options]
    groups = [methods] if setup.is_dry else [[name] for name in methods]
    for group in groups:
        with sheet.trying(", ".join(group)):
            found = gradients.measure(gradients.parse([*options, "--methods", *group]))
            for table in found["tables"]:
                for row in table["results"]:
                    if row["variant"] == "mean" and group is not groups[0]:
                        continue
                    sheet.row(
                        f"ms per update: {table['tasks']} tasks, batch {table['batch_size']}",
                        method=row["variant"],
                        ms=row["median"],
                        smallest=row["min"],
                        largest=row["max"],
                        times_the_mean=row["times_the_mean"]["median"],
                    )


# ---- replay ----


def replay(setup: Setup, sheet: Sheet) -> None:
    """Measure adding a vector step and drawing a batch, from the host's and the GPU's memory."""
    device = torch.device(setup.device)
    sizes = setup.sizes
    for tasks, rows in sizes.batches:
        spec = Work(tasks, tasks * rows, 8, 1, "32-true", "none", setup.device, None, 0, 0).spec
        step = metaworld_step(tasks)
        title = f"us per batch of {tasks * rows} ({tasks} tasks), {sizes.capacity:,} transitions"
        for place, name in ((CPU, "host"), (device, setup.device)):
            with sheet.trying(f"replay in the memory of {name}"):
                buffer = filled(spec, step, sizes.capacity, place)
                note_draws(buffer, tasks * rows, device, title, name, sizes, sheet)
                calls = {"adding a vector step": partial(buffer.add, step)}
                note_calls(calls, title, name, sizes, sheet)


def metaworld_step(num_tasks: int) -> Transitions:
    """Return a vector step with MetaWorld's shapes and types."""
    observation_ED, action_EA, reward_E, next_ED, terminated_E = vector_step(num_tasks)
    task_E = np.arange(num_tasks)
    return Transitions(
        observation_ED, action_EA, reward_E, next_ED, terminated_E, terminated_E, task_E, task_E
    )


def filled(spec: EnvSpec, step: Transitions, capacity: int, device: torch.device) -> ReplayBuffer:
    """Return a replay that holds the same vector step over and over."""
    buffer = ReplayBuffer(spec, capacity, device=device)
    for _ in range(capacity // spec.num_tasks):
        buffer.add(step)
    return buffer


def note_draws(
    buffer: ReplayBuffer,
    batch_size: int,
    device: torch.device,
    title: str,
    where: str,
    sizes: Sizes,
    sheet: Sheet,
) -> None:
    """Note how long a batch takes until it is on the device, in each way that there is.

    Args:
        buffer: what is drawn from.
        batch_size: over all tasks.
        device: where the batch is needed.
        title: of the table.
        where: the replay is.
        sizes: how often it is measured.
        sheet: to write to.
    """
    calls: dict[str, Callable[[], Any]] = {
        "drawing alone": partial(buffer.sample, batch_size),
        "drawing, as a run does": stream(buffer, batch_size, device),
    }
    if buffer.storage.device == CPU:
        calls["drawing and copying, not pinned"] = lambda: move_data_to_device(
            buffer.sample(batch_size), device
        )
    note_calls(calls, title, where, sizes, sheet)


def stream(
    buffer: ReplayBuffer, batch_size: int, device: torch.device
) -> Callable[[], TransitionBatch]:
    """Return what draws the next batch as ``MultiTaskData`` and Lightning do."""
    is_pinned = device.type == "cuda" and buffer.storage.device == CPU
    loader = DataLoader(ReplayDataset(buffer, batch_size), batch_size=None, pin_memory=is_pinned)
    batches = iter(loader)
    return lambda: move_data_to_device(next(batches), device)


def note_calls(
    calls: Mapping[str, Callable[[], Any]], title: str, where: str, sizes: Sizes, sheet: Sheet
) -> None:
    """Note the microseconds of calls, each in a row."""
    measures = {name: timed(call, sizes.calls) for name, call in calls.items()}
    alternate(measures, 1)
    for name, seconds in alternate(measures, sizes.repeats).items():
        found = spread([value * 1e6 for value in seconds])
        sheet.row(
            title,
            what=name,
            replay=where,
            us=found["median"],
            smallest=found["min"],
            largest=found["max"],
        )


# ---- pixels ----


def pixels(setup: Setup, sheet: Sheet) -> None:
    """Measure an update from pictures, and drawing them, from frames on the host and the GPU."""
    sizes = setup.sizes
    device = torch.device(setup.device)
    for size in sorted({encoding.size for encoding in sizes.encodings}, reverse=True):
        encodings = [encoding for encoding in sizes.encodings if encoding.size == size]
        spec = picture_spec(size)
        source = picture_steps(spec)
        batches: dict[int, TransitionBatch] = {}
        for place, name in ((CPU, "host"), (device, setup.device)):
            with sheet.trying(f"{size} x {size} frames in the memory of {name}"):
                buffer = ReplayBuffer(spec, sizes.picture_capacity, device=place)
                for step in itertools.islice(source, sizes.picture_capacity // PICTURE_TASKS):
                    buffer.add(step)
                for rows in sizes.picture_rows:
                    batch_size = rows * PICTURE_TASKS
                    title = f"us per batch of {batch_size} stacks of {size} x {size}"
                    note_draws(buffer, batch_size, device, title, name, sizes, sheet)
                    batches[rows] = move_data_to_device(buffer.sample(batch_size), device)
                del buffer
        for rows, batch in batches.items():
            for encoding in encodings:
                is_first = rows == sizes.picture_rows[0]
                measure_encoding(encoding, spec, batch, setup, sheet, is_first)


def measure_encoding(
    encoding: Encoding,
    spec: EnvSpec,
    batch: TransitionBatch,
    setup: Setup,
    sheet: Sheet,
    is_first: bool,
) -> None:
    """Note the milliseconds of SAC's update from pictures that are shifted, as DrQ's."""
    sizes = setup.sizes
    batch_size = len(batch.reward_B)
    measures = {}
    ways = [(precision, "none") for precision in PRECISIONS]
    if "cudagraphs" in sizes.compile and not encoding.channels_last and is_first:
        ways.append(("bf16-mixed", "cudagraphs"))  # once for each encoder: compiling takes long
    for precision, how in ways:
        name = precision if how == "none" else f"{precision}, compile {how}"
        with sheet.trying(f"{encoding.name} {name}, channels_last {encoding.channels_last}"):
            measure = picture_update(encoding, spec, batch, precision, how, setup)
            measure()
            measures[name] = measure
    for name, seconds in alternate(measures, sizes.repeats).items():
        found = spread([value * 1e3 for value in seconds])
        sheet.row(
            f"ms per update from pictures, batch {batch_size}",
            encoder=f"{encoding.name}, {encoding.size} x {encoding.size}",
            channels_last=encoding.channels_last,
            variant=name,
            ms=found["median"],
            smallest=found["min"],
            largest=found["max"],
        )


def picture_update(
    encoding: Encoding,
    spec: EnvSpec,
    batch: TransitionBatch,
    precision: str,
    how: Any,
    setup: Setup,
) -> Callable[[], float]:
    """Return what measures an update, after the first ones."""
    sizes = setup.sizes
    encoder = partial(PixelEncoder, strides=encoding.strides, channels_last=encoding.channels_last)
    network = partial(MLP, width=sizes.picture_width, depth=2)
    sac = SAC(
        spec,
        encoder=encoder,
        actor=network,
        critic=network,
        transforms=[RandomShift],
        compile=how,
        seed=1,
    ).to(setup.device)
    batch_size = len(batch.reward_B)
    work = Work(
        PICTURE_TASKS, batch_size, sizes.picture_width, 2, precision, how, setup.device, None, 0, 0
    )
    update = direct_update(work, sac)
    for _ in range(sizes.settle):
        update(batch)
    return timed(partial(update, batch), max(2, sizes.updates // 4))


def picture_spec(size: int) -> EnvSpec:
    """Return tasks with stacks of 3 frames, as ``Pixels`` has them, and six actions."""
    return EnvSpec(
        task_names=tuple(f"task-{i}" for i in range(PICTURE_TASKS)),
        observation_space=Box(0, 255, (3, 3, size, size), np.uint8),
        action_space=Box(-1.0, 1.0, (6,), np.float32),
        horizon=1_000,
        has_success=False,
        train_tasks=tuple(range(PICTURE_TASKS)),
        protocol={},
        frame_stack=3,
    )


def picture_steps(spec: EnvSpec, recorded: int = 20) -> Iterator[Transitions]:
    """Yield vector steps without an end, with pictures of random bytes that are used in turn."""
    draws = np.random.default_rng(0)
    tasks = spec.num_tasks
    _, *frame = spec.observation_space.shape
    frames = draws.integers(0, 256, (recorded, tasks, *frame), np.uint8)
    task_E = np.arange(tasks)
    none_E = np.zeros(tasks, np.bool_)
    for step in itertools.count():
        places = [(step + back) % recorded for back in range(4)]
        window = np.stack([frames[place] for place in places], axis=1)
        yield Transitions(
            observation_ED=window[:, :-1],
            action_EA=draws.uniform(-1, 1, (tasks, spec.action_space.shape[0])).astype(np.float32),
            reward_E=draws.standard_normal(tasks),
            next_observation_ED=window[:, 1:],
            terminated_E=none_E,
            truncated_E=none_E,
            task_E=task_E,
            env_E=task_E,
        )


# ---- whole runs ----

ON_CPU = "CPU, 32-true"
"""Compared, and never trained with."""


class Variant(NamedTuple):
    """Options of a whole run."""

    name: str
    options: Mapping[str, Any]
    updates_per_step: int = 1


def run_variants(setup: Setup) -> list[Variant]:
    """Return options with which a run on a GPU is compared.

    More copies of each task make a vector step larger. With as many more updates per vector step,
    there are as many updates per environment step as in the protocol, and acting and stepping are
    waited for less often.
    """
    precision = "trainer.precision"
    graphs = {"model.init_args.compile": "cudagraphs"}
    several = {"rollout.envs_per_task": 4, "rollout.updates_per_step": 4}
    bf16 = {precision: "bf16-mixed"}
    if setup.is_dry:
        return [Variant("32-true", {}), Variant("bf16-mixed, 4 copies", bf16 | several, 4)]
    return [
        Variant("32-true", {}),
        Variant("bf16-mixed", bf16),
        Variant("bf16-mixed, replay on the host", bf16 | {"data.on_device": "false"}),
        Variant("32-true, cudagraphs", graphs),
        Variant("bf16-mixed, cudagraphs", bf16 | graphs),
        Variant("bf16-mixed, 4 copies", bf16 | several, 4),
        Variant("32-true, cudagraphs, 4 copies", graphs | several, 4),
        Variant("bf16-mixed, cudagraphs, 4 copies", bf16 | graphs | several, 4),
        Variant(ON_CPU, {"trainer.accelerator": "cpu"}),
    ]


def paced(name: str, options: Mapping[str, Any], setup: Setup, settle: int) -> Entrant:
    """Return a whole run through the command line whose updates are made in windows."""
    folder = setup.path("runs")
    folder.mkdir(exist_ok=True)
    sizes = setup.sizes
    never = {f"{section}.every": NEVER for section in ("evaluation", "metrics", "checkpoint")}
    given = {
        "root": folder,
        "name": "pace",
        "trainer.accelerator": setup.accelerator,
        "trainer.enable_progress_bar": "false",
        "rollout.warmup_steps": 60 if setup.is_dry else 8_000,
        "rollout.total_steps": NEVER,
        **never,
        **sizes.run_options,
        **options,
    }
    command = of_command_line(sizes.configs, given, sizes.run_updates, settle)
    return Entrant(name, "ours", command, folder, START_LIMIT)


def pace(setup: Setup, sheet: Sheet) -> None:
    """Measure whole runs with several options, in turn."""
    variants = {variant.name: variant for variant in run_variants(setup)}
    entrants = {
        name: paced(name, variant.options, setup, setup.sizes.settle)
        for name, variant in variants.items()
    }
    note_runs(entrants, variants, "env steps per second of whole runs", setup, sheet)
    note_skipped(setup.path("runs"), sheet)


def note_skipped(folder: Path, sheet: Sheet) -> None:
    """Note where PyTorch has compiled a function and left out its CUDA graph."""
    for log in sorted(folder.glob("*.log")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if SKIPPED in line]
        if lines:
            sheet.note(f"{log.stem}: {len(lines)} times {lines[0][-300:]}")


def note_runs(
    entrants: Mapping[str, Entrant],
    variants: Mapping[str, Variant],
    title: str,
    setup: Setup,
    sheet: Sheet,
) -> None:
    """Let whole runs take turns, and note a row for each."""
    sizes = setup.sizes
    with ready(entrants, sheet) as able:
        seconds = windows_of(able, setup, sheet)
        for name, values in seconds.items():
            entrant = able[name]
            environments = entrant.about["environments"]
            steps = sizes.run_updates / variants[name].updates_per_step * environments
            rates = spread([steps / value for value in values])
            parts = entrant.fractions()
            sheet.row(
                title,
                variant=name,
                env_steps_per_s=rates["median"],
                smallest=rates["min"],
                largest=rates["max"],
                updates_per_s=rates["median"] * sizes.run_updates / steps,
                start_up_s=entrant.ready_seconds,
                **{f"{part}_share": share for part, share in parts.items()},
            )


def ranks(setup: Setup, sheet: Sheet) -> None:
    """Measure whole runs of two processes beside one of one, each with the batch of the one."""
    rows = 12 if setup.is_dry else 1280
    numbers = (2,) if setup.is_dry else (1, 2)
    entrants = {}
    variants = {}
    for number in numbers:
        name = f"{number} processes"
        options = {
            "trainer.devices": number,
            "data.batch_size": number * rows,
            "rollout.envs_per_task": number,
        }
        if setup.is_dry:
            options["rollout.timeout"] = 60
        variants[name] = Variant(name, options)
        entrants[name] = paced(name, options, setup, setup.sizes.settle)
    note_runs(entrants, variants, "env steps per second of several processes", setup, sheet)


def training(setup: Setup, sheet: Sheet) -> None:
    """Train for a time, and project how long the whole protocol takes.

    The options are those of the quickest variant that ``pace`` has found, or bf16-mixed with CUDA
    graphs where it has not been run. See ``projection`` for the formula.
    """
    variant = quickest(setup)
    sheet.note(f"options: {variant.name}")
    root = setup.path("runs")
    is_dry = setup.is_dry
    options = {
        "root": root,
        "name": "training",
        "seed_everything": 1,
        "trainer.accelerator": setup.accelerator,
        "trainer.enable_progress_bar": "false",
        "trainer.max_time": clock(setup.minutes),
        "metrics.every": 60 if is_dry else 10_000,
        "metrics.system": "true",
        **setup.sizes.run_options,
        **variant.options,
    }
    if is_dry:
        options |= {"rollout.warmup_steps": 60, "rollout.total_steps": 600, "evaluation.every": 300}
    command = [sys.executable, *COMMAND, "fit"]
    command += [word for config in setup.sizes.configs for word in ("-c", config)]
    command += [f"--{name}={value}" for name, value in options.items()]
    log = setup.path("training.log")
    with watched(setup, sheet):
        returncode = printing_to(log, command, setup)
    if returncode != 0:
        sheet.failure("fit", log.read_text())
    runs = [*(root / "training").glob(f"version_*/{METRICS}")]
    if not runs:
        return
    newest = max(runs, key=lambda path: path.stat().st_mtime)
    note_training(read_metrics(newest.parent), sheet)


@contextlib.contextmanager
def watched(setup: Setup, sheet: Sheet) -> Iterator[None]:
    """Note how busy the GPU is in a block, where ``nvidia-smi`` is."""
    fields = "utilization.gpu,power.draw,memory.used"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-l", "5"]
    log = setup.path("busy.csv")
    with log.open("w") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            process.kill()
            process.wait()
    means = mean_columns(log.read_text())
    for name, value in zip(("% of the time busy", "W", "MiB"), means, strict=False):
        sheet.row("the GPU while training", what=name, mean=value)


def mean_columns(text: str) -> list[float]:
    """Return the mean of each column of numbers, without lines that have others."""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            rows.append([float(cell) for cell in line.split(",")])
    return np.mean(rows, axis=0).tolist() if rows else []


def clock(minutes: float) -> str:
    """Return a time as Lightning's trainer takes it, ``DD:HH:MM:SS``."""
    left, seconds = divmod(round(60 * minutes), 60)
    hours, left = divmod(left, 60)
    return f"00:{hours:02d}:{left:02d}:{seconds:02d}"


def quickest(setup: Setup) -> Variant:
    """Return the options for training."""
    found = read_sheet(setup.path("pace.json"))["tables"]
    rows = [row for table in found.values() for row in table]
    variants = {variant.name: variant for variant in run_variants(setup)}
    known = [row for row in rows if row["variant"] in variants and row["variant"] != ON_CPU]
    if known:
        return variants[max(known, key=lambda row: row["env_steps_per_s"])["variant"]]
    return variants.get("bf16-mixed, cudagraphs", next(iter(variants.values())))


def note_training(curves: Mapping[str, Curve], sheet: Sheet) -> None:
    """Note what a run's metrics say of its speed, and the projection."""
    found = projection(curves)
    for name, value in found.items():
        sheet.row("training", what=name, value=value)
    for name in ("eval/success", "system/cpu_percent", "system/gpu_memory_gib"):
        if name in curves:
            env_steps, values = curves[name]
            sheet.row("training", what=f"{name} after {env_steps[-1]:,} steps", value=values[-1])


def projection(curves: Mapping[str, Curve]) -> dict[str, float]:
    """Return rates of a run, and the hours that ``TARGET`` environment steps take.

    A row ``i`` of ``metrics.csv`` covers ``n_i`` environment steps in ``t_i = n_i / r_i`` seconds,
    ``r_i`` being ``time/env_steps_per_second``. Of them ``e_i t_i`` are spent on evaluations and
    ``c_i t_i`` on checkpoints. The first two rows with updates are left out: losses are compiled
    and graphs recorded there. Then

      rate while training    ``r = sum n_i / sum t_i (1 - e_i - c_i)``
      rate with all          ``w = sum n_i / sum t_i``
      hours                  ``TARGET / r / 3600`` and ``TARGET / w / 3600``

    The second is right for the schedule of evaluations and checkpoints that the run had.
    """
    steps, rates = (np.asarray(column, float) for column in curves["time/env_steps_per_second"])
    _, updates_per_s = curves["time/updates_per_second"]
    spent = np.sum([curves[f"time/{name}_fraction"][1] for name in EXTRAS], axis=0)
    n = np.diff(steps, prepend=0.0)
    is_learning = np.asarray(updates_per_s) > 0
    is_counted = is_learning & (np.cumsum(is_learning) > SETTLING_ROWS) & (n > 0)
    if not is_counted.any():
        return {"env steps": float(steps[-1])}
    n = n[is_counted]
    seconds = n / rates[is_counted]
    learning = (seconds * (1 - spent[is_counted])).sum()
    updates = (np.asarray(updates_per_s)[is_counted] * seconds).sum()
    rate = float(n.sum() / learning)
    whole = float(n.sum() / seconds.sum())
    return {
        "env steps": float(steps[-1]),
        "env steps that are counted": float(n.sum()),
        "seconds of them": float(seconds.sum()),
        "env steps per second while training": rate,
        "updates per second while training": float(updates / learning),
        "env steps per second with evaluations and checkpoints": whole,
        "hours to 20 M env steps without evaluations and checkpoints": TARGET / rate / 3600,
        "hours to 20 M env steps with them": TARGET / whole / 3600,
    }


EXTRAS = ("evaluate", "checkpoint")
SETTLING_ROWS = 2
PARTS: dict[str, Callable[[Setup, Sheet], None]] = {
    "tests": tests,
    "updates": updates,
    "gradients": gradient_methods,
    "replay": replay,
    "pixels": pixels,
    "pace": pace,
    "ranks": ranks,
    "training": training,
}


def sheet_path(setup: Setup) -> Path:
    """Return where a part writes what it finds."""
    return setup.path(f"{setup.part}.json")


def run_part(setup: Setup) -> None:
    """Run one part; what goes wrong is in its sheet."""
    path = sheet_path(setup)
    path.unlink(missing_ok=True)
    sheet = Sheet(path)
    with sheet.trying(setup.part):
        PARTS[setup.part](setup, sheet)


def main() -> None:
    """Run the part that the options name."""
    setup = Setup(**json.loads(sys.argv[1]))
    end_on_sigterm()
    if setup.is_dry:
        torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    os.environ.setdefault("TORCH_LOGS", HINTS)  # of the processes that it starts
    run_part(setup)


if __name__ == "__main__":
    main()
