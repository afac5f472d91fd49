"""What a run left behind, whether two runs are equal, and whether every stored transition happened.

Shapes: ``N`` rows of one environment in their order, ``D`` observation.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from benchmarks.trial import TOY_HORIZON, TOY_TASKS
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.checkpoints.parts import manifests_of
from mtrl_lightning.envs import MetaWorld, ToyReach
from mtrl_lightning.envs.benchmarks.toy import STEP
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import RingStorage
from mtrl_lightning.schema import transition_fields
from mtrl_lightning.spec import EnvSpec

Rows: TypeAlias = Mapping[str, Tensor]
"""Transitions, by the names of their fields."""
FRAME = 18
"""Where MetaWorld's observation continues with the former frame."""
GOAL = 36
"""Where it continues with the goal."""
TOY_TOLERANCE = 1e-5
"""Of ``ToyReach``'s positions and rewards, which are stored in single precision."""


class Outcome(NamedTuple):
    """What a run left behind."""

    state: dict[str, Any]
    """Parts of the last checkpoint that must not depend on how often the run was interrupted."""
    rings: list[Rows]
    """The replay, one environment after another, oldest row first; of all ranks in turn."""
    metrics: list[dict[str, str]]
    """``metrics.csv`` without times."""

    @property
    def counters(self) -> dict[str, int]:
        """The checkpoint's counters."""
        return self.state["mtrl_lightning"]["counters"]


def read_outcome(folder: Path, config: Mapping[str, Any]) -> Outcome:
    """Read a run's last checkpoint, its replay and its metrics."""
    checkpoint = load_checkpoint(folder / "checkpoints" / "last.ckpt")
    state = {
        key: checkpoint[key]
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "mtrl_lightning")
    }
    state["ranks"] = [
        {**part, "data": part["data"]["buffer"]} for part in checkpoint.get("ranks", [])
    ]
    state["draws"] = checkpoint["MultiTaskData"]["buffer"]
    state["callbacks"] = {
        key: value for key, value in checkpoint["callbacks"].items() if key != "checkpoint"
    }
    del state["callbacks"]["metrics"]["metrics_csv"]["crc32"]  # the file has times in it
    spec = spec_of(config)
    rings: list[Rows] = []
    for manifest in manifests_of(checkpoint):
        place = folder / "replay" / manifest.get("folder", "")
        rings += rings_of(load_replay(place, manifest, spec))
    return Outcome(state, rings, read_metrics(folder / "metrics.csv"))


def spec_of(config: Mapping[str, Any]) -> EnvSpec:
    """Return the spec of a configuration's tasks."""
    given = config["data"]["benchmark"]["init_args"]
    if "num_tasks" in given:
        return ToyReach(given["num_tasks"], given["horizon"]).spec
    return MetaWorld(given["tasks"], horizon=given["horizon"]).spec


def load_replay(folder: Path, manifest: dict[str, Any], spec: EnvSpec) -> RingStorage:
    """Read the rows of a manifest."""
    num_envs = len(manifest["added"])
    storage = RingStorage(transition_fields(spec), num_envs, manifest["capacity"])
    ReplaySnapshots(folder).load(manifest, storage)
    return storage


def rings_of(storage: RingStorage) -> list[Rows]:
    """Return each ring's rows, oldest first."""
    spans = enumerate(
        zip((storage.added_E - storage.size_E).tolist(), storage.added_E.tolist(), strict=True)
    )
    return [storage.take(*storage.numbers(ring, first, end)) for ring, (first, end) in spans]


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Return the rows of ``metrics.csv`` without the columns of times."""
    with path.open(newline="") as file:
        return [
            {k: v for k, v in row.items() if not k.startswith("time/")}
            for row in csv.DictReader(file)
        ]


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Return the places at which two nested values differ in type, shape or any bit of a number."""
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
        return [] if same else [where]
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return [f"{where}: other keys"]
        return [text for key in a for text in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} and {len(b)} entries"]
        return [
            text
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for text in differences(x, y, f"{where}[{i}]")
        ]
    return [] if a == b or (a != a and b != b) else [f"{where}: {repr(a)[:40]} and {repr(b)[:40]}"]


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


class RowsCompared(NamedTuple):
    """How the rows of two replays differ."""

    lost: int
    """Rows of the first that the second lacks."""
    false: int
    """Rows of the second that the first lacks."""


def compare_rows(wanted: Sequence[Rows], found: Sequence[Rows]) -> RowsCompared:
    """Compare replays row by row, whatever their order."""
    lost = 0
    false = 0
    for a, b in zip(wanted, found, strict=True):
        rows_a = Counter(_row_bytes(a))
        rows_b = Counter(_row_bytes(b))
        lost += (rows_a - rows_b).total()
        false += (rows_b - rows_a).total()
    return RowsCompared(lost, false)


def _row_bytes(rows: Rows) -> list[bytes]:
    fields = [field.numpy().reshape(len(field), -1).astype(np.float64) for field in rows.values()]
    return [row.tobytes() for row in np.concatenate(fields, axis=1)]


class Chain(NamedTuple):
    """How the rows of one environment follow one another."""

    false: int
    """Rows whose successor cannot have come from their observation."""
    cut: int
    """Episodes that ended before their time, as they do where an environment was rebuilt."""
    torn: int
    """Places where a row is missing: the next neither follows the one before nor begins an episode.

    A fault while no step was made explains one: the new episode's first action was chosen for the
    former episode, and is dropped.
    """
    overlong: int
    """Rows beyond an episode's time."""


def examine(rows: Rows, horizon: int, from_beginning: bool = True) -> Chain:
    """Check the rows of one MetaWorld environment, whose observations contain the frame before.

    Args:
        rows: in the order in which they were stored.
        horizon: steps of an episode.
        from_beginning: whether the first row begins an episode; else when that one began is not
            known.
    """
    here_ND = rows["observation"].numpy()
    next_ND = rows["next_observation"].numpy()
    false_N = (next_ND[:, FRAME:GOAL] != here_ND[:, :FRAME]).any(1) | (
        next_ND[:, GOAL:] != here_ND[:, GOAL:]
    ).any(1)
    begins_N = (here_ND[:, :FRAME] == here_ND[:, FRAME:GOAL]).all(1)
    cut = 0
    overlong = 0
    torn = int(from_beginning and not begins_N[0])
    length: int | None = 1 if from_beginning else None
    for k, follows in enumerate((next_ND[:-1] == here_ND[1:]).all(1).tolist()):
        if follows:
            length = None if length is None else length + 1
            overlong += length is not None and length > horizon
        elif begins_N[k + 1]:
            cut += length is not None and length < horizon
            length = 1
        else:
            torn += 1
            length = 2
    return Chain(int(false_N.sum()), cut, torn, overlong)


def examine_toy(rows: Rows, task: int, from_beginning: bool = True) -> Chain:
    """Check the rows of one environment of ``ToyReach`` by its equations.

    A missing row cannot be told from the end of an episode: both count as ``cut``.

    Args:
        rows: in the order in which they were stored.
        task: number of the task.
        from_beginning: whether the first row begins an episode.
    """
    here_ND = rows["observation"].double()
    next_ND = rows["next_observation"].double()
    action_NA = rows["action"].double().clamp(-1, 1)
    angle = 2 * np.pi * task / TOY_TASKS
    goal_D = 0.7 * torch.tensor([np.cos(angle), np.sin(angle)])
    moved_ND = (here_ND + STEP * action_NA).clamp(-1, 1)
    reward_N = 1 - (next_ND - goal_D).norm(dim=1)
    false_N = ((next_ND - moved_ND).abs() > TOY_TOLERANCE).any(1)
    false_N |= (rows["reward"].double() - reward_N).abs() > TOY_TOLERANCE
    lengths = [1]
    for follows in (next_ND[:-1] == here_ND[1:]).all(1).tolist():
        if follows:
            lengths[-1] += 1
        else:
            lengths.append(1)
    whole = lengths[:-1] if from_beginning else lengths[1:-1]
    cut = sum(length < TOY_HORIZON for length in whole)
    overlong = sum(max(0, length - TOY_HORIZON) for length in lengths)
    return Chain(int(false_N.sum()), cut, 0, overlong)
