"""The parts ``replay`` and ``pixels`` of ``benchmarks.gpu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.gpu_setup import Setup, Sizes
from benchmarks.gpu_sheet import Sheet, cells_of
from benchmarks.measuring import (
    PRECISIONS,
    alternate,
    spread,
)
from benchmarks.pixels import NUM_TASKS, Encoding, pixel_replay, pixel_sac, pixel_spec
from benchmarks.replay import timed
from benchmarks.replays import vector_step
from benchmarks.updaters import Work, direct_update
from mtrl_lightning.replay import ReplayBuffer
from mtrl_lightning.resources import CPU
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.types import TransitionBatch, Transitions


def replay(setup: Setup, sheet: Sheet) -> None:
    """Measure adding a vector step and drawing a batch, from the host's and the GPU's memory."""
    device = torch.device(setup.device)
    sizes = setup.sizes
    for tasks, rows in sizes.batches:
        spec = Work(
            tasks=tasks,
            batch_size=tasks * rows,
            width=8,
            depth=1,
            precision="32-true",
            compile="none",
            device=setup.device,
            threads=None,
            steps=0,
            settle=0,
        ).spec
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
    if buffer.storage.device == CPU and device.type == "cuda":
        calls["drawing and copying, pinned"] = stream(buffer, batch_size, device, pin_memory=True)
    note_calls(calls, title, where, sizes, sheet)


class Batches(IterableDataset):
    """Sample batches from a replay buffer for ever.

    Args:
        buffer: to sample from.
        batch_size: rows of a batch, over all tasks.
    """

    def __init__(self, buffer: ReplayBuffer, batch_size: int) -> None:
        self._buffer = buffer
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[TransitionBatch]:
        """Sample batches."""
        while True:
            yield self._buffer.sample(self._batch_size)


def stream(
    buffer: ReplayBuffer, batch_size: int, device: torch.device, pin_memory: bool = False
) -> Callable[[], TransitionBatch]:
    """Return what draws the next batch as ``MultiTaskData`` and Lightning do, or pinned."""
    loader = DataLoader(Batches(buffer, batch_size), batch_size=None, pin_memory=pin_memory)
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
            **cells_of("us", found),
        )


def pixels(setup: Setup, sheet: Sheet) -> None:
    """Measure an update from images, and sampling them, from frames on the host and the GPU."""
    sizes = setup.sizes
    device = torch.device(setup.device)
    for encoding in sizes.encodings:
        batches: dict[int, TransitionBatch] = {}
        for place, name in ((CPU, "host"), (device, setup.device)):
            size = f"{encoding.size} x {encoding.size}"
            with sheet.trying(f"{size} frames in the memory of {name}"):
                spec = pixel_spec(encoding.size)
                buffer = pixel_replay(spec, sizes.image_capacity, device=place)
                for rows in sizes.image_rows:
                    batch_size = rows * NUM_TASKS
                    title = f"us per batch of {batch_size} stacks of {size}"
                    note_draws(buffer, batch_size, device, title, name, sizes, sheet)
                    batches[rows] = move_data_to_device(buffer.sample(batch_size), device)
                del buffer
        for rows, batch in batches.items():
            is_first = rows == sizes.image_rows[0]
            for channels_last in (False, True):
                # once for each encoder: compiling takes long
                is_compiled = is_first and not channels_last and "cudagraphs" in sizes.compile
                measure_encoding(encoding, channels_last, batch, setup, sheet, is_compiled)


def measure_encoding(
    encoding: Encoding,
    channels_last: bool,
    batch: TransitionBatch,
    setup: Setup,
    sheet: Sheet,
    is_compiled: bool,
) -> None:
    """Note the milliseconds of DrQ's update.

    Args:
        encoding: the encoder.
        channels_last: whether a pixel's channels lie together in memory.
        batch: on the device.
        setup: of the part.
        sheet: to write to.
        is_compiled: whether an update with CUDA graphs is measured, too.
    """
    sizes = setup.sizes
    batch_size = batch.reward_Rn.numel()
    measures = {}
    ways = [(precision, "none") for precision in PRECISIONS]
    if is_compiled:
        ways.append(("bf16-mixed", "cudagraphs"))
    for precision, how in ways:
        name = precision if how == "none" else f"{precision}, compile {how}"
        with sheet.trying(f"{encoding} {name}, channels_last {channels_last}"):
            work = Work(
                tasks=NUM_TASKS,
                batch_size=batch_size,
                width=sizes.image_width,
                depth=2,
                precision=precision,
                compile=how,
                device=setup.device,
                threads=None,
                steps=0,
                settle=sizes.settle,
            )
            update = direct_update(work, pixel_sac(work, encoding, channels_last, "drq"))
            for _ in range(work.settle):
                update(batch)
            # an even number, since every second update includes the actor
            measures[name] = timed(partial(update, batch), 2 * max(1, sizes.updates // 8))
            measures[name]()
    for name, seconds in alternate(measures, sizes.repeats).items():
        found = spread([value * 1e3 for value in seconds])
        sheet.row(
            f"ms per update from images, batch {batch_size}",
            encoder=str(encoding),
            channels_last=channels_last,
            variant=name,
            **cells_of("ms", found),
        )
