"""Natural-language task descriptions and their frozen embeddings.

Shapes: ``B`` batch, ``C`` embedding, ``T`` tasks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError, name_hint
from mtrl_lightning.networks.conditioning import TaskConditioning
from mtrl_lightning.networks.network import TaskAxis, task_values
from mtrl_lightning.spec import EnvSpec

DESCRIPTIONS = Path(__file__).parent / "data" / "descriptions.json"
"""One sentence per task of MetaWorld, the DeepMind Control Suite and ten toy tasks."""
EMBEDDINGS = Path(__file__).parent / "data" / "embeddings.json"
"""Embeddings of the sentences, from ``python -m benchmarks.embed_descriptions``."""

_OLD_NAMES = {
    "basketball": "basket-ball",
    "button-press-topdown": "button-press_topdown",
    "disassemble": "dissassemble",
}
"""Names of tasks that MetaWorld's first version spells differently."""


class TaskTable(nn.Module):
    """Hold a frozen vector per task, saved in checkpoints.

    Args:
        table_TC: the vectors.
    """

    table_TC: Tensor

    def __init__(self, table_TC: np.ndarray) -> None:
        super().__init__()
        table = torch.from_numpy(table_TC).to(torch.get_default_dtype())
        self.register_buffer("table_TC", table)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map tasks ``[B]`` to ``[B, C]``."""
        return task_values(self.table_TC, task_B)

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the vectors; untrained tasks have their own."""
        return {"table_TC": TaskAxis(has_mean=False)}


class Language(TaskConditioning):
    """Use a frozen embedding of each task's description.

    An untrained task without an embedding gets the mean of the trained tasks' embeddings.

    Args:
        spec: the tasks.
        path: JSON file ``{task name: [numbers]}``, as in mtrl; None for the file of this package,
            with 384 numbers for each task of MetaWorld and of the DeepMind Control Suite, and for
            the first ten tasks of the toy benchmarks.
    """

    def __init__(self, spec: EnvSpec, *, path: str | None = None) -> None:
        super().__init__(spec)
        file = EMBEDDINGS if path is None else Path(path)
        embeddings = read_json(file)
        known = [
            task
            for task, name in enumerate(spec.task_names)
            if task in spec.train_tasks or find_name(name, embeddings) is not None
        ]
        known_KC = load_embeddings(file, [spec.task_names[task] for task in known])
        trained = [index for index, task in enumerate(known) if task in spec.train_tasks]
        table_TC = np.tile(known_KC[trained].mean(0), (spec.num_tasks, 1))
        table_TC[known] = known_KC
        self.out_dim = table_TC.shape[1]
        self.embeddings = TaskTable(table_TC)

    def forward(self, task_B: Tensor) -> Tensor:
        """Map ``[B]`` to ``[B, C]``."""
        return self.embeddings(task_B)


def load_embeddings(path: str | Path, names: Sequence[str]) -> np.ndarray:
    """Return the embeddings ``[T, C]`` of the named tasks in a JSON file ``{name: [numbers]}``.

    The task ``reach-v3`` also matches ``reach-v2``, ``reach-v1`` and ``reach``.
    """
    embeddings = read_json(path)
    rows = []
    for name in names:
        key = find_name(name, embeddings)
        if key is None:
            raise ConfigurationError(
                f"{path} has no embedding of the task {name}: {name_hint(name, embeddings)}"
                " Add the task to the file: docs/algorithms.md shows how to embed a description"
            )
        rows.append(embeddings[key])
    try:
        table_TC = np.array(rows, np.float32)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: embeddings must be lists of numbers of the same length ({error})"
        ) from error
    if table_TC.ndim != 2 or not np.isfinite(table_TC).all():
        raise ConfigurationError(f"{path}: embeddings must be lists of finite numbers")
    return table_TC


def find_name(name: str, known: Collection[str]) -> str | None:
    """Return the known name of a task or of another version of it, or None."""
    stem = re.sub(r"-v\d+$", "", name)
    stems = [stem, _OLD_NAMES.get(stem, stem)]
    others = [s + version for s in stems for version in ("-v3", "-v2", "-v1", "")]
    return next((candidate for candidate in [name, *others] if candidate in known), None)


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON file ``{task name: value}``."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigurationError(f'{path} must map task names to values, as in {{"reach-v3": ...}}')
    return content
