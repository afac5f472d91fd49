"""The parts ``replay`` and ``pixels`` of ``benchmarks.gpu``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils.data import DataLoader

from benchmarks.gpu_setup import Encoding, Setup, Sizes
from benchmarks.gpu_sheet import Sheet
from benchmarks.measuring import (
    PRECISIONS,
    alternate,
    spread,
)
from benchmarks.replay import timed
from benchmarks.replays import vector_step
from benchmarks.updaters import Work, direct_update
from mtrl_lightning.algorithms import SAC, RandomShift
from mtrl_lightning.memory import CPU
from mtrl_lightning.networks import MLP, PixelEncoder
from mtrl_lightning.replay import ReplayBuffer, ReplayDataset
from mtrl_lightning.types import EnvSpec, TransitionBatch, Transitions

PICTURE_TASKS = 4
"""Tasks of the updates from pictures."""


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
