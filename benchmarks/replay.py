"""What the replay costs: adding transitions, sampling batches, memory, and saving.

Parts (``--parts``):

  sampling  a replay of MetaWorld's sizes beside Stable-Baselines3's (sb3), and the share that
            sampling has of an update of SAC. With --device cuda ours is measured in the host's
            memory too, with the copy to the device
  saving    a checkpoint's replay files beside torch.save and torch.load of the same arrays; every
            write waits for the disk
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.spaces import Box
from lightning.fabric.utilities.apply_func import move_data_to_device

from benchmarks.measuring import (
    SB3,
    Program,
    Table,
    positive,
    ratios,
    rows_of,
    say,
    spread,
    timed,
    turns,
)
from benchmarks.updates import ACTION, OBSERVATION, Work, direct_of
from mtrl_lightning.devices import CPU
from mtrl_lightning.envs import MetaWorld
from mtrl_lightning.errors import import_optional
from mtrl_lightning.replay import ReplayBuffer, ReplaySnapshots
from mtrl_lightning.replay.storage import RingStorage, bytes_needed
from mtrl_lightning.resources import keep_freed_memory
from mtrl_lightning.schema import STORED, transition_fields
from mtrl_lightning.types import Transitions

PARTS = ("sampling", "saving")
KINDS = ("ours", "sb3")
MILLION = 1_000_000
WIDTH = 400
"""Of the updated networks."""
CHECKPOINTS = 10
"""Checkpoints in a measurement of saving."""


def add_options(add: Callable[..., Any]) -> None:
    """Add the benchmark's own options."""
    text = "numbers of tasks of sampling, each a table"
    add("--parts", nargs="+", choices=PARTS, default=["sampling"], help="what is measured")
    add("--variants", nargs="+", choices=KINDS, default=list(KINDS), help="what takes turns")
    add("--tasks", nargs="+", type=positive, default=[10, 50], help=text)
    add("--rows", type=positive, default=128, help="per task of a batch")
    add("--capacity", type=positive, help="transitions; None: 200000, of saving 1000000")
    text = "in a round: samples, ten times as many additions"
    add("--calls", type=positive, default=50, help=text)
    text = "on the disk that is measured; None: the system's temporary one"
    add("--folder", type=Path, help=text)


def _check(options: argparse.Namespace) -> None:
    if "sampling" in options.parts and "sb3" in options.variants:
        import_optional(*SB3, "leave it out with --variants ours")


# ---- sampling ----


class Replay(NamedTuple):
    """A replay that is measured."""

    add: Callable[[], Any]
    """Adds a vector step."""
    sample: Callable[[], Any]
    """Samples a batch, and copies it to the device of the updates."""
    bytes_per_transition: float


def our_replay(work: Work, capacity: int, device: str) -> Replay:
    """Return ``ReplayBuffer`` in a device's memory, whose batches have equal shares of tasks."""
    buffer = ReplayBuffer(work.spec, capacity, device=torch.device(device))
    observation_ED, action_EA, reward_E, next_ED, terminated_E = vector_step(work.tasks)
    task_E = np.arange(work.tasks)
    ends = (terminated_E, terminated_E)
    step = Transitions(observation_ED, action_EA, reward_E, next_ED, *ends, task_E, task_E)

    def sample() -> Any:
        return move_data_to_device(buffer.sample(work.batch_size), torch.device(work.device))

    held = buffer.capacity
    return Replay(
        partial(buffer.add, step), sample, bytes_needed(buffer.storage.fields, held) / held
    )


def sb3_replay(work: Work, capacity: int) -> Replay:
    """Return Stable-Baselines3's ``ReplayBuffer``, with the one-hot and MetaWorld's float64."""
    spaces = (
        Box(-np.inf, np.inf, (OBSERVATION + work.tasks,), np.float64),
        Box(-1.0, 1.0, (ACTION,), np.float32),
    )
    kind = import_optional(*SB3).common.buffers.ReplayBuffer
    buffer = kind(capacity, *spaces, device=work.device, n_envs=work.tasks)
    observation_ED, action_EA, reward_E, next_ED, terminated_E = vector_step(work.tasks, True)
    infos: list[dict[str, Any]] = [{} for _ in range(work.tasks)]
    step = (observation_ED, next_ED, action_EA, reward_E, terminated_E, infos)
    arrays = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
    num_bytes = sum(getattr(buffer, name).nbytes for name in arrays)
    return Replay(
        partial(buffer.add, *step),
        partial(buffer.sample, work.batch_size),
        num_bytes / (buffer.buffer_size * work.tasks),
    )


def vector_step(num_tasks: int, one_hot: bool = False) -> tuple[npt.NDArray, ...]:
    """Return a vector step's columns, with MetaWorld's shapes and types."""
    generator = np.random.default_rng(0)
    observation_ED, next_ED = generator.standard_normal((2, num_tasks, OBSERVATION))
    if one_hot:
        code = np.eye(num_tasks)
        observation_ED = np.concatenate([observation_ED, code], 1)
        next_ED = np.concatenate([next_ED, code], 1)
    action_EA = generator.uniform(-1, 1, (num_tasks, ACTION)).astype(np.float32)
    reward_E = generator.standard_normal(num_tasks)
    return observation_ED, action_EA, reward_E, next_ED, np.zeros(num_tasks, np.bool_)


def sampling_tables(num_tasks: int, options: argparse.Namespace) -> list[Table]:
    """Return the tables of adding and of sampling."""
    say(f"{num_tasks} tasks: filling")
    capacity = options.capacity or 200_000
    batch_size = options.rows * num_tasks
    work = Work(num_tasks, batch_size, WIDTH, 3, options.device)
    replays = {}
    if "ours" in options.variants:
        replays["ours"] = our_replay(work, capacity, work.device)
        if work.device == "cuda":
            replays["ours, on the host"] = our_replay(work, capacity, CPU.type)
    if "sb3" in options.variants:
        replays["sb3"] = sb3_replay(work, capacity)
    for replay in replays.values():
        for _ in range(capacity // work.tasks):
            replay.add()
    say(f"{num_tasks} tasks: {options.rounds} rounds")
    add_calls = {name: replay.add for name, replay in replays.items()}
    sample_calls = {name: replay.sample for name, replay in replays.items()}
    update_calls = {one: direct_of(replace(work, precision=one)) for one in options.precisions}
    added = turns(add_calls, 10 * options.calls, options.rounds)
    sampled = turns(sample_calls, options.calls, options.rounds)
    updated = turns(update_calls, 3, options.rounds)
    add_rows = rows_of(added, ["sb3"], "us")
    for row in add_rows:
        row["bytes per transition"] = replays[row["variant"]].bytes_per_transition
    sample_rows = rows_of(sampled, ["sb3"], "us")
    for row in sample_rows:
        for precision, values in updated.items():
            share = ratios(sampled[row["variant"]], values)
            row[f"share of an update {precision}"] = share
    where = f"{num_tasks} tasks, {capacity:,} transitions, on {options.device}"
    return [
        Table(f"us to add a vector step; {where}", add_rows),
        Table(f"us to sample a batch of {batch_size:,}; {where}", sample_rows),
        Table("ms per update of SAC", rows_of(updated)),
    ]


# ---- saving ----


def saving_table(options: argparse.Namespace) -> Table:
    """Return the table of saving and loading a replay of MT10's sizes."""
    capacity = options.capacity or MILLION
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rounds.append(measure_saving(Path(folder), capacity))
    rows = []
    for what in rounds[0]:
        values = [found[what] for found in rounds]
        name, _, unit = what.rpartition(", ")
        value: Any = spread(values) if unit == "s" else statistics.median(values)
        rows.append({"variant": name, unit: value})
    return Table(f"saving and loading {capacity:,} transitions of MT10", rows)


def measure_saving(folder: Path, capacity: int) -> dict[str, float]:
    """Return seconds and MiB of one round, by names that end with the unit."""
    spec = MetaWorld("MT10").spec
    fields = transition_fields(spec)
    generator = np.random.default_rng(0)
    storage = RingStorage(fields, spec.num_tasks, capacity // spec.num_tasks)
    every = capacity // CHECKPOINTS
    snapshots = ReplaySnapshots(folder / "ahead")
    longest = 0.0
    saves = []
    sizes = []
    for _ in range(CHECKPOINTS):  # chunks that are full are written before the checkpoint
        before = used(folder)
        waits = []
        for _ in range(10):
            fill(storage, every // 10, generator)
            waits.append(timed(lambda: snapshots.write_full_chunk(storage, wait=False))())
        waits.append(timed(lambda: snapshots.save(storage))())
        longest = max(longest, *waits)
        saves.append(sum(waits))
        sizes.append((used(folder) - before) / 2**20)
    fresh = ReplaySnapshots(folder / "fresh")
    path = folder / "torch.pt"
    rows = storage.to_columns(storage.added_E - storage.size_E, storage.added_E)
    columns = {name: torch.as_tensor(column) for name, column in rows.items()}
    found = {
        "the replay in memory, MiB": bytes_needed(fields, capacity) / 2**20,
        "files of the first checkpoint, MiB": sizes[0],
        "the first checkpoint, s": saves[0],
        "the tenth checkpoint, s": saves[-1],
        "the longest wait of a step, s": longest,
        "all at once, s": timed(lambda: fresh.save(storage))(),
        "torch.save, s": timed(lambda: torch_save(columns, path))(),
    }
    manifest = fresh.save(storage)
    empty = RingStorage(fields, spec.num_tasks, storage.capacity)
    found["load, s"] = timed(lambda: ReplaySnapshots(folder / "fresh").load(manifest, empty))()
    found["torch.load, s"] = timed(lambda: torch_load(columns, path))()
    return found


def fill(storage: RingStorage, rows: int, generator: np.random.Generator) -> None:
    """Add random transitions of all tasks."""
    ring_N = np.repeat(np.arange(storage.num_envs), rows // storage.num_envs)
    N = len(ring_N)
    observation_ND = generator.standard_normal((N, OBSERVATION))
    action_NA = generator.uniform(-1, 1, (N, ACTION)).astype(np.float32)
    reward_N = generator.standard_normal(N)
    columns = (observation_ND, action_NA, reward_N, observation_ND, np.zeros(N, np.bool_))
    storage.add(ring_N, dict(zip(STORED, columns, strict=True)))


def torch_save(columns: dict[str, torch.Tensor], path: Path) -> None:
    """Save as one would without this package, and wait for the disk."""
    with path.open("wb") as file:
        torch.save(columns, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(columns: dict[str, torch.Tensor], path: Path) -> None:
    """Load into memory that is there."""
    for name, column in torch.load(path, weights_only=True).items():
        columns[name].copy_(column)


def used(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(options: argparse.Namespace) -> list[Table]:
    """Return the tables."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    keep_freed_memory()  # as a run does; all variants gain from it
    np.random.seed(0)  # Stable-Baselines3 samples with the global generator
    tables: list[Table] = []
    if "sampling" in options.parts:
        for number in options.tasks:
            tables += sampling_tables(number, options)
    if "saving" in options.parts:
        tables.append(saving_table(options))
    return tables


program = Program(
    "replay", __doc__, add_options, measure, _check, device=True, precisions=True, threads=True
)
options_of = program.options_of
main = program.main

if __name__ == "__main__":
    main()
