"""The model card of an exported policy, with the metadata that Hugging Face's hub reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mtrl_lightning import __version__
from mtrl_lightning.algorithms.description import summarize
from mtrl_lightning.formats import UNKNOWN, markdown, number
from mtrl_lightning.loading import LoadedPolicy
from mtrl_lightning.reports.record import is_evaluation, is_run, read_run
from mtrl_lightning.runs import run_folder_of

CARD = "README.md"
TEMPLATE = "card.md.jinja"
DECIMALS = 3
"""Of results."""


def write_card(
    file: Path, policy: LoadedPolicy, difference: float, checkpoint: Path, config: str | None
) -> Path:
    """Write the card beside an exported policy, and return its path.

    Args:
        file: the exported policy.
        policy: from which it was made.
        difference: the largest one between their actions.
        checkpoint: of the policy, in the folder of its run.
        config: name of the run's configuration beside the file; None if it was started in Python.

    Raises:
        ConfigurationError: if the run's ``metrics.csv`` is damaged.
    """
    run_folder = run_folder_of(checkpoint)
    record = read_run(run_folder) if is_run(run_folder) else None
    env_steps, results = last_evaluation(record.curves if record else {}, policy.env_steps)
    means = [(name, number(results[name], DECIMALS)) for name in results if name.count("/") == 1]
    versions = record.versions if record else {}
    is_float = np.issubdtype(policy.spec.observation_space.dtype, np.floating)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    text = environment.get_template(TEMPLATE).render(
        name=record.name if record else run_folder.parent.name,
        spec=policy.spec,
        env_steps=policy.env_steps,
        step_unit=policy.step_unit,
        version=__version__,
        file=file.name,
        dtype="float32" if is_float else policy.spec.observation_space.dtype,
        tasks=_tasks(policy, results),
        results=_table(("metric", "mean"), means) if means else "",
        evaluated_at=env_steps,
        protocol=_table(("setting", "value"), policy.spec.protocol.items()),
        algorithm=summarize(policy.algorithm.description),
        # without the folders of this machine
        checkpoint=checkpoint.resolve().relative_to(run_folder.parent.parent).as_posix(),
        digest=hashlib.sha256(checkpoint.read_bytes()).hexdigest(),
        config=config,
        versions=", ".join(f"{name} {version}" for name, version in versions.items()) or UNKNOWN,
        difference=difference,
    )
    card = file.with_name(CARD)
    card.write_text(text, encoding="utf-8")
    return card


def last_evaluation(curves: Mapping[str, Any], env_steps: int) -> tuple[int, dict[str, float]]:
    """Return the environment steps and the metrics of the last evaluation before a checkpoint.

    Args:
        curves: of the run, ``(env_steps, values)`` by metric.
        env_steps: of the checkpoint.
    """
    latest = {}
    for name, (steps, values) in curves.items():
        index = int(np.searchsorted(steps, env_steps, side="right")) - 1
        if is_evaluation(name) and index >= 0:
            latest[name] = (steps[index], values[index])
    last = max((step for step, _ in latest.values()), default=0)
    return last, {name: value for name, (step, value) in sorted(latest.items()) if step == last}


def _tasks(policy: LoadedPolicy, results: Mapping[str, Any]) -> str:
    """Return the table of tasks: numbers, sizes where they differ, and results."""
    spec = policy.spec
    metrics = [name for name in results if any(key.startswith(f"{name}/") for key in results)]
    sizes = {"observation": spec.observation_sizes, "action": spec.action_sizes}
    sizes = {name: values for name, values in sizes.items() if values}
    rows = [
        (
            index,
            task,
            "yes" if index in spec.train_tasks else "no",
            *(values[index] for values in sizes.values()),
            *(number(results.get(f"{metric}/{task}"), DECIMALS) for metric in metrics),
        )
        for index, task in enumerate(spec.task_names)
    ]
    return _table(("number", "task", "trained", *sizes, *metrics), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return markdown([header, *([str(cell) for cell in row] for row in rows)])
