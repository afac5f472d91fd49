"""The model card of an exported policy, and ``policy.json``, the same for programs.

The card begins with the metadata that Hugging Face's hub reads.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mtrl_lightning import __version__
from mtrl_lightning.export.names import ONNX, POLICY_FILES, TORCH_EXPORT
from mtrl_lightning.export.policy import TOLERANCE, Comparison
from mtrl_lightning.formats import UNKNOWN, markdown, number
from mtrl_lightning.loading import LoadedPolicy
from mtrl_lightning.reports.record import is_evaluation, is_run, read_run

CARD = "README.md"
DESCRIPTION = "policy.json"
CONFIG = "config.yaml"
USES = {
    ONNX: """\
import onnxruntime

policy = onnxruntime.InferenceSession("policy.onnx")
(action,) = policy.run(None, {"observation": observation, "task": task})  # NumPy arrays""",
    TORCH_EXPORT: """\
import torch

policy = torch.export.load("policy.pt2").module()
action = policy(observation, task)  # tensors""",
}
"""How each format is used, in Python."""
DECIMALS = 3
"""Of results."""


class Origin(NamedTuple):
    """Where an exported policy comes from."""

    checkpoint: Path
    run_folder: Path
    config: Mapping[str, Any]
    """The configuration of the run; empty if it was started from Python."""
    command: Sequence[str]
    """The command that exported it."""

    def shown(self, path: Path) -> str:
        """Return a path without the folders of this machine: from the name of the run on."""
        root = self.run_folder.resolve().parent.parent
        path = path.resolve()
        return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name

    def shown_command(self) -> str:
        """Return the command that exported the policy, without the folders of this machine."""
        words = []
        for word in self.command:
            option, separator, value = word.rpartition("=")
            shown = self.shown(Path(value)) if Path(value).is_absolute() else value
            words.append(f"{option}{separator}{shown}")
        return shlex.join(words)


def write_card(
    folder: Path, policy: LoadedPolicy, format: str, comparison: Comparison, origin: Origin
) -> Path:
    """Write the card and ``policy.json`` beside an exported policy, and return the card's path.

    Args:
        folder: of the exported policy.
        policy: the exported one.
        format: ``onnx`` or ``torch.export``.
        comparison: of the exported file with the policy.
        origin: where it comes from.

    Raises:
        ConfigurationError: if the run's ``metrics.csv`` is damaged.
    """
    record = read_run(origin.run_folder) if is_run(origin.run_folder) else None
    results = last_evaluation(record.curves, policy.env_steps) if record else {}
    spec = policy.spec
    digest = hashlib.sha256(origin.checkpoint.read_bytes()).hexdigest()
    description = {
        "file": POLICY_FILES[format],
        "checkpoint": origin.shown(origin.checkpoint),
        "checkpoint_sha256": digest,
        "env_steps": policy.env_steps,
        "tasks": list(policy.task_names),
        "inputs": {"observation": ["rows", *spec.observation_space.shape], "task": ["rows"]},
        "outputs": {"action": ["rows", *spec.action_space.shape]},
        "observation_sizes": list(spec.observation_sizes),
        "action_sizes": list(spec.action_sizes),
        "protocol": dict(spec.protocol),
        "trained_with": dict(record.versions) if record else {},
        "exported_with": {"mtrl_lightning": __version__, "torch": torch.__version__},
        "results": results,
        "comparison": comparison._asdict(),
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    path = folder / CARD
    path.write_text(card(policy, format, comparison, origin, description), encoding="utf-8")
    return path


def last_evaluation(curves: Mapping[str, Any], env_steps: int) -> dict[str, Any]:
    """Return the metrics of the last evaluation up to these environment steps, and its steps.

    Args:
        curves: of the run, ``(env_steps, values)`` by metric.
        env_steps: of the checkpoint.
    """
    latest = {}
    for name, (steps, values) in curves.items():
        index = int(np.searchsorted(steps, env_steps, side="right")) - 1
        if is_evaluation(name) and index >= 0:
            latest[name] = (steps[index], values[index])
    last = max((step for step, _ in latest.values()), default=None)
    results = {name: value for name, (step, value) in sorted(latest.items()) if step == last}
    return {"env_steps": last, **results} if results else {}


def card(
    policy: LoadedPolicy,
    format: str,
    comparison: Comparison,
    origin: Origin,
    description: Mapping[str, Any],
) -> str:
    """Return the text of a model card.

    Args:
        policy: the exported one.
        format: ``onnx`` or ``torch.export``.
        comparison: of the exported file with the policy.
        origin: where it comes from.
        description: content of ``policy.json``.
    """
    spec = policy.spec
    results = description["results"]
    name = origin.config.get("name") or origin.run_folder.parent.name
    dtype = np.dtype(spec.observation_space.dtype)
    dtype_name = "float32" if np.issubdtype(dtype, np.floating) else dtype.name
    shape = ", ".join(map(str, spec.observation_space.shape))
    evaluated = f", after {results['env_steps']:,} environment steps" if results else ": none"
    means = [(key, number(results[key], DECIMALS)) for key in results if key.count("/") == 1]
    made_by = f"`mtrl-lightning fit -c {CONFIG}`" if origin.config else "a program in Python"
    return f"""\
---
library_name: mtrl_lightning
pipeline_tag: reinforcement-learning
tags: [reinforcement-learning, multi-task, robotics]
---

# {name}: one policy for {spec.num_tasks} {"tasks" if spec.num_tasks > 1 else "task"}

The deterministic policy of an agent after {policy.env_steps:,} environment steps, exported by
mtrl_lightning {__version__}. The file runs without that package.

```python
{USES[format]}
```

- `observation`: `[rows, {shape}]`, {dtype_name}, as the environments of the protocol return it
  (with the run's wrappers). Normalization and encoder are in the file. Pad smaller ones with zeros.
- `task`: `[rows]`, int64, the number in the table below.
- `action`: `[rows, {spec.action_space.shape[0]}]`, float32, from -1 to 1, the bounds of the
  environments of the protocol, after the run's action transforms. Components that a task
  lacks are 0.

## Tasks

{_tasks(policy, results)}

## Results

The last evaluation before this checkpoint{evaluated}.

{_table(("metric", "mean over the tasks"), means)}

## Protocol

{_table(("setting", "value"), spec.protocol.items())}

## How it was made

- algorithm: {policy.algorithm.summary}
- checkpoint: `{description["checkpoint"]}`, SHA-256 `{description["checkpoint_sha256"]}`
- trained by {made_by} with {_versions(description["trained_with"])}
- exported by `{origin.shown_command()}` with {_versions(description["exported_with"])}
- compared with the policy on {comparison.num_observations:,} random observations, in one batch and
  one by one: largest difference of an action {comparison.max_difference:.1e}, allowed {TOLERANCE:g}
- one action takes {comparison.exported_microseconds:.0f} µs on the CPU of the exporting machine
"""


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


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or UNKNOWN
