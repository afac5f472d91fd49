"""Demonstrations of the toy benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtrl_lightning.demonstrations import RecordedEpisode, collect, open_data_sets, write_data_sets
from mtrl_lightning.envs import Benchmark, ToyReach
from mtrl_lightning.transitions import Policy
from tests.helpers.fakes import Seeker


def write_demonstrations(
    folder: Path,
    benchmark: Benchmark | None = None,
    policy: Policy | None = None,
    num_episodes: int = 8,
    **options: Any,
) -> Path:
    """Write episodes of a benchmark; by default those of three tasks of ``ToyReach``."""
    need_minari()
    benchmark = ToyReach() if benchmark is None else benchmark
    policy = Seeker(benchmark.spec.num_tasks) if policy is None else policy
    collected = collect(policy, benchmark, num_episodes, num_workers=0, **options)
    write_data_sets(folder, benchmark.spec, collected.episodes, {"policy": "by hand"})
    return folder


def read_episodes(folder: str | Path) -> dict[str, list[RecordedEpisode]]:
    """Return all episodes of each task."""
    return {name: list(data.episodes()) for name, data in open_data_sets(folder).items()}


def need_minari() -> None:
    """Skip a test where Minari is not installed."""
    pytest.importorskip("minari")
    pytest.importorskip("h5py")
