"""How long saving and loading the replay takes, beside ``torch.save`` of the same arrays.

``python -m benchmarks.snapshots`` fills a replay of MetaWorld's MT10 sizes, saves it
as training does, and alternates with ``torch.save`` and ``torch.load`` of the same tensors. Every
write waits for the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import described, machine
from mtrl_lightning.envs import MetaWorld
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import RingStorage, bytes_needed
from mtrl_lightning.schema import STORED, transition_fields
from mtrl_lightning.spec import EnvSpec


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows", type=int, default=1_000_000, help="transitions that the replay holds"
    )
    parser.add_argument("--every", type=int, default=100_000, help="transitions between two saves")
    parser.add_argument("--chunk_mebibytes", type=float, default=32.0, help="size of a file")
    parser.add_argument("--repeats", type=int, default=3, help="of everything; medians are printed")
    parser.add_argument(
        "--folder",
        type=Path,
        help="on the disk to measure; the system's temporary one if not given",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    runs = []
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            runs.append(measure(Path(folder), given.rows, given.every, given.chunk_mebibytes))
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    if given.json:
        print(json.dumps({"machine": machine(), "medians": medians, "runs": runs}))
        return
    print(
        f"{given.rows:,} transitions of MT10, {given.repeats} repeats, medians;"
        f" {described(machine())}"
    )
    for name, value in medians.items():
        print(f"{name:<58} {value:12,.3f}")


def measure(folder: Path, rows: int, every: int, chunk_mebibytes: float) -> dict[str, float]:
    """Return seconds and MiB of one round."""
    spec = MetaWorld("MT10").spec
    fields = transition_fields(spec)
    storage = RingStorage(fields, spec.num_tasks, rows // spec.num_tasks)
    result: dict[str, float] = {"replay, MiB": bytes_needed(fields, rows) / 2**20}
    snapshots = ReplaySnapshots(folder / "ahead", chunk_mebibytes)
    longest = 0.0
    saves = []
    sizes = []
    generator = np.random.default_rng(0)
    for _ in range(10):  # ten checkpoints; what is written ahead between two belongs to the second
        before = used(folder)
        total = 0.0
        for _ in range(10):
            fill(storage, spec, every // 10, generator)
            total += (wait := seconds(lambda: snapshots.write_full_chunk(storage, wait=False)))
            longest = max(longest, wait)
        total += (wait := seconds(lambda: snapshots.save(storage)))
        longest = max(longest, wait)
        saves.append(total)
        sizes.append((used(folder) - before) / 2**20)
    result["first checkpoint's rows, MiB"] = sizes[0]
    result["first checkpoint's rows, s"] = saves[0]
    result["tenth checkpoint's rows, MiB"] = sizes[9]
    result["tenth checkpoint's rows, s"] = saves[9]
    result["longest time that stepping stood still, s"] = longest
    fill(storage, spec, max(0, rows - 10 * every), generator)

    fresh = ReplaySnapshots(folder / "fresh", chunk_mebibytes)
    result["all at once into an empty folder, s"] = seconds(lambda: fresh.save(storage))
    result["all at once into an empty folder, MiB"] = used(folder / "fresh") / 2**20
    fill(storage, spec, every, generator)
    result["then with what is new, s"] = seconds(lambda: fresh.save(storage))
    tensors = storage._columns
    path = folder / "torch.pt"
    result["torch.save, s"] = seconds(lambda: torch_save(tensors, path))
    result["torch.save, MiB"] = path.stat().st_size / 2**20

    manifest = fresh.save(storage)
    empty = RingStorage(fields, spec.num_tasks, storage.capacity)
    result["load, s"] = seconds(lambda: ReplaySnapshots(folder / "fresh").load(manifest, empty))
    result["torch.load, s"] = seconds(lambda: torch_load(path, empty))
    return result


def fill(storage: RingStorage, spec: EnvSpec, rows: int, generator: np.random.Generator) -> None:
    """Add random transitions, in parts."""
    each = rows // spec.num_tasks
    for start in range(0, each, 1000):
        n = min(1000, each - start) * spec.num_tasks
        observation_ND = generator.standard_normal((n, 39))
        action_NA = generator.uniform(-1, 1, (n, 4)).astype(np.float32)
        reward_N = generator.standard_normal(n)
        terminated_N = np.zeros(n, np.bool_)
        ring_N = np.repeat(np.arange(spec.num_tasks), n // spec.num_tasks)
        columns = (observation_ND, action_NA, reward_N, observation_ND, terminated_N)
        storage.add(ring_N, dict(zip(STORED, columns, strict=True)))


def torch_save(tensors: dict[str, Any], path: Path) -> None:
    """Save as one would without this package."""
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(path: Path, storage: RingStorage) -> None:
    """Load into memory that is there."""
    for name, source in torch.load(path, weights_only=True).items():
        storage._columns[name].copy_(source)


def seconds(work: Callable[[], Any]) -> float:
    """Return how long something takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def used(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
