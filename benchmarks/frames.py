"""What keeping each frame once costs and saves, beside a replay of stacks.

``python -m benchmarks.frames`` fills two replays with images of the DeepMind Control Suite, in
stacks of 3 frames of 84 x 84, and takes turns with them: adding a vector step, drawing a batch,
writing a chunk file, reading it. It shows microseconds, the bytes of a transition in memory and on
disk, and what a million transitions take.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

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
)
from mtrl_lightning.envs import DMControl, Pixels, VectorEnv
from mtrl_lightning.replay import ReplayBuffer, ReplaySnapshots
from mtrl_lightning.replay.sizes import replay_bytes
from mtrl_lightning.replay.storage import RingStorage, Storage, bytes_needed
from mtrl_lightning.types import Transitions

MILLION = 1_000_000
STACKS = "stacks"
RECORDED = 100
"""Vector steps that are recorded, and added over and over."""


def parse(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of("frames", __doc__, repeats=5)
    add = parser.add_argument
    tasks = ["cartpole-swingup", "cheetah-run", "walker-walk", "finger-spin"]
    add("--tasks", nargs="+", default=tasks, help="(default %(default)s)")
    add("--size", type=positive, default=84, help="of a frame's side (default %(default)s)")
    add("--rows", type=positive, default=32, help="of a batch for each task (default %(default)s)")
    add("--capacity", type=positive, default=4_000, help="transitions (default %(default)s)")
    add("--calls", type=positive, default=20, help="in a round (default %(default)s)")
    add("--folder", type=Path, help="on the disk to measure (default the temporary folder's)")
    options = parser.parse_args(args)
    with refusing(parser):
        options.benchmark = Pixels(DMControl(options.tasks), options.size)
    return options


def recorded(benchmark: Pixels) -> list[Transitions]:
    """Return the transitions of some vector steps with random actions."""
    task_E = np.arange(benchmark.spec.num_tasks)
    envs = VectorEnv(benchmark, task_E.tolist(), num_workers=0)
    generator = np.random.default_rng(0)
    observation_ED, _ = envs.reset(seed=0)
    found = []
    for _ in range(RECORDED):
        action_EA = generator.uniform(-1, 1, envs.action_space.shape).astype(np.float32)
        envs.send(action_EA)
        step = envs.receive()
        found.append(
            Transitions(
                observation_ED,
                action_EA,
                step.reward_E,
                step.next_observation_ED,
                step.terminated_E,
                step.truncated_E,
                task_E,
                task_E,
            )
        )
        observation_ED = step.observation_ED
    envs.close()
    return found


def add_next(buffer: ReplayBuffer, source: Iterator[Transitions]) -> None:
    """Add the next vector step."""
    buffer.add(next(source))


def timed(call: Callable[[], Any], calls: int) -> Callable[[], float]:
    """Return what measures the seconds of one of several calls."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    return measure


def chunk_of(storage: Storage, folder: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what writes all that is held into chunk files, and what reads them."""
    path = folder / type(storage).__name__
    manifest: dict[str, Any] = {}

    def write() -> None:
        manifest.update(ReplaySnapshots(path).save(storage))

    def read() -> None:
        ReplaySnapshots(path).load(manifest, storage)

    return write, read


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JSON's content."""
    spec = options.benchmark.spec
    say("recording")
    source = itertools.cycle(recorded(options.benchmark))
    buffers = {
        STACKS: ReplayBuffer(spec, options.capacity, storage=RingStorage),
        "frames": ReplayBuffer(spec, options.capacity),
    }
    options.benchmark = " ".join(spec.task_names)
    say("filling")
    for _ in range(options.capacity // spec.num_tasks):
        transitions = next(source)
        for buffer in buffers.values():
            buffer.add(transitions)
    measures: dict[str, Callable[[], float]] = {}
    batch_size = options.rows * spec.num_tasks
    sizes = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for name, buffer in buffers.items():
            measures[f"add, {name}"] = timed(partial(add_next, buffer, source), options.calls)
            measures[f"draw, {name}"] = timed(partial(buffer.sample, batch_size), options.calls)
            write, read = chunk_of(buffer.storage, Path(folder))
            measures[f"write all, {name}"] = timed(write, 1)
            measures[f"read all, {name}"] = timed(read, 1)
        alternate(measures, 1)
        say(f"{options.repeats} rounds")
        seconds = alternate(measures, options.repeats)
        for name, buffer in buffers.items():
            path = Path(folder) / type(buffer.storage).__name__
            newest = ReplaySnapshots(path).save(buffer.storage)
            used = sum((path / chunk["file"]).stat().st_size for chunk in newest["chunks"])
            sizes[name] = used / len(buffer)
    tables = {}
    for what in ("add", "draw", "write all", "read all"):
        found = {name: seconds[f"{what}, {name}"] for name in buffers}
        tables[what] = results(found, [STACKS], scale=1e6)
    fields = buffers[STACKS].storage.fields
    memory = {
        STACKS: bytes_needed(fields, MILLION),
        "frames": replay_bytes(spec, fields, spec.num_tasks, MILLION // spec.num_tasks),
    }
    return {
        **heading("frames", options),
        "batch_size": batch_size,
        "unit": "us",
        "results": tables,
        "gib_of_a_million": {name: number / 2**30 for name, number in memory.items()},
        "disk_bytes_per_transition": sizes,
    }


def text_of(content: dict[str, Any]) -> str:
    """Return the tables."""
    settings = content["settings"]
    parts = []
    for what, rows in content["results"].items():
        title = f"{what}; {settings['capacity']:,} transitions, batches of {content['batch_size']}"
        parts.append(report(title, rows, content["unit"]))
    for name, memory in content["gib_of_a_million"].items():
        disk = content["disk_bytes_per_transition"][name]
        parts.append(
            f"{name}: a million transitions take {memory:.1f} GiB of memory, and"
            f" {disk * MILLION / 2**30:.1f} GiB of disk"
        )
    return "\n\n".join(parts)


main = program(parse, measure, text_of)

if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main(None))
