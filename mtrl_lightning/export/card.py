"""The model card of an exported policy: what it is, what it takes, how good it is, how it was made.

Its first lines are the metadata that Hugging Face's hub reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtrl_lightning import __version__
from mtrl_lightning.export.names import ONNX, POLICY_FILES, TORCH_EXPORT, TORCHSCRIPT
from mtrl_lightning.export.policy import TOLERANCE, Comparison
from mtrl_lightning.formats import markdown, number
from mtrl_lightning.loading import LoadedPolicy
from mtrl_lightning.reports.record import is_evaluation, is_run, read_run
from mtrl_lightning.spec import EnvSpec

CARD = "README.md"
DESCRIPTION = "policy.json"
"""Beside the card, the same for programs."""
CONFIG = "config.yaml"
METADATA = """\
---
library_name: mtrl_lightning
pipeline_tag: reinforcement-learning
tags: [reinforcement-learning, multi-task, robotics]
---
"""
USES = {
    TORCHSCRIPT: """\
import torch

policy = torch.jit.load("policy.pt")
action = policy(observation, task)  # tensors""",
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
"""Decimals of results."""
BLOCK_BYTES = 1 << 20
"""Bytes of a checkpoint that are hashed at once."""
PACKAGES = ("torch", "onnx", "onnxruntime", "onnxscript", "numpy", "gymnasium", "lightning")


class Origin(NamedTuple):
    """Where an exported policy comes from."""

    checkpoint: Path
    run_folder: Path
    config: Mapping[str, Any]
    """The configuration of the run; empty if it was started from Python."""
    command: Sequence[str]
    """The command that exported it."""


def write_card(
    folder: Path, policy: LoadedPolicy, format: str, comparison: Comparison, origin: Origin
) -> Path:
    """Write the card and ``policy.json`` beside an exported policy, and return the card's path.

    Formats that were exported from the same checkpoint before stay in them.

    Args:
        folder: of the exported policy.
        policy: what was exported.
        format: its format.
        comparison: of the exported policy with the policy.
        origin: where it comes from.
    """
    results = last_evaluation(origin.run_folder, policy.env_steps)
    formats = {**_other_formats(folder, origin), format: comparison._asdict()}
    description = {
        "checkpoint": _shown_path(origin.checkpoint, origin),
        "checkpoint_sha256": _sha256(origin.checkpoint),
        "env_steps": policy.env_steps,
        "tasks": list(policy.task_names),
        "inputs": {
            "observation": ["rows", *policy.spec.observation_space.shape],
            "task": ["rows"],
        },
        "observation_sizes": list(policy.spec.observation_sizes),
        "action_sizes": list(policy.spec.action_sizes),
        "outputs": {"action": ["rows", *policy.spec.action_space.shape]},
        "protocol": dict(policy.spec.protocol),
        "trained_with": trained_with(origin.run_folder),
        "results": results,
        "formats": formats,
    }
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    path = folder / CARD
    path.write_text(card(policy, formats, results, origin), encoding="utf-8")
    return path


def _other_formats(folder: Path, origin: Origin) -> dict[str, Any]:
    """Return the comparisons of the files that are there and come from the same checkpoint."""
    try:
        former = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        is_same = former["checkpoint_sha256"] == _sha256(origin.checkpoint)
        formats = dict(former["formats"]) if is_same else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return {
        name: values
        for name, values in formats.items()
        if name in POLICY_FILES
        and (folder / POLICY_FILES[name]).is_file()
        and isinstance(values, dict)
        and set(values) == set(Comparison._fields)
        and all(isinstance(value, (int, float)) for value in values.values())
    }


def last_evaluation(run_folder: Path, env_steps: int) -> dict[str, Any]:
    """Return the metrics of the last evaluation up to these environment steps.

    They are by name, with ``env_steps`` beside them; empty if there is none.

    Raises:
        ConfigurationError: if ``metrics.csv`` is damaged.
    """
    if not is_run(run_folder):
        return {}
    found: dict[str, tuple[int, float]] = {}
    for name, (steps, values) in read_run(run_folder).curves.items():
        if not is_evaluation(name):
            continue
        until = [(step, value) for step, value in zip(steps, values, strict=True)]
        until = [point for point in until if point[0] <= env_steps]
        if until:
            found[name] = until[-1]
    if not found:
        return {}
    last = max(step for step, _ in found.values())
    results = {name: value for name, (step, value) in sorted(found.items()) if step == last}
    return {"env_steps": last, **results}


def card(
    policy: LoadedPolicy,
    formats: Mapping[str, Mapping[str, float]],
    results: Mapping[str, Any],
    origin: Origin,
) -> str:
    """Return the text of a model card.

    Args:
        policy: what was exported.
        formats: the fields of a ``Comparison`` by format.
        results: what ``last_evaluation`` returns.
        origin: where the policy comes from.
    """
    spec = policy.spec
    name = origin.config.get("name") or origin.run_folder.parent.name
    parts = [
        f"{METADATA}\n# {name}: one policy for {_count(spec.num_tasks, 'task')}",
        f"The deterministic policy of an agent after {policy.env_steps:,} environment steps,"
        f" exported by mtrl_lightning {__version__}. The file runs without that package.",
        _uses(formats),
        _inputs(spec),
        _tasks(spec, results),
        _results(results),
        "## Protocol\n\n"
        + _markdown(("setting", "value"), [(key, value) for key, value in spec.protocol.items()]),
        _comparisons(formats),
        _making(policy, origin),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _uses(formats: Mapping[str, Any]) -> str:
    uses = [f"```python\n{USES[name]}\n```" for name in formats]
    return "\n\n".join(["## Use", *uses])


def _inputs(spec: EnvSpec) -> str:
    own_dtype = np.dtype(spec.observation_space.dtype)
    dtype = "float32" if np.issubdtype(own_dtype, np.floating) else own_dtype.name
    shape = ", ".join(str(size) for size in spec.observation_space.shape)
    (action_size,) = spec.action_space.shape
    lines = [
        "## Input and output\n",
        f"- `observation`: `[rows, {shape}]`, {dtype}, as the environments of the protocol give it"
        " (with the run's wrappers). Normalization and encoder are in the file.",
        "- `task`: `[rows]`, int64, the number in the table below.",
        f"- `action`: `[rows, {action_size}]`, float32, between -1 and 1, the bounds of the"
        " environments of the protocol; the run's action transforms have been applied.",
    ]
    if spec.observation_sizes or spec.action_sizes:
        lines.append(
            "- Tasks have different sizes: zeros follow a smaller observation, and what follows a"
            " smaller action is 0."
        )
    return "\n".join(lines)


def _tasks(spec: EnvSpec, results: Mapping[str, Any]) -> str:
    ends = [f"/{name}" for name in spec.task_names]
    metrics = sorted(
        {key.removesuffix(end) for key in results for end in ends if key.endswith(end)}
    )
    rows = []
    for place, name in enumerate(spec.task_names):
        sizes: list[Any] = []
        if spec.observation_sizes:
            sizes.append(spec.observation_sizes[place])
        if spec.action_sizes:
            sizes.append(spec.action_sizes[place])
        values = [number(results.get(f"{metric}/{name}"), DECIMALS) for metric in metrics]
        is_trained = "yes" if place in spec.train_tasks else "no"
        rows.append((place, name, is_trained, *sizes, *values))
    size_names = ["observation"] * bool(spec.observation_sizes) + ["action"] * bool(
        spec.action_sizes
    )
    header = ("number", "task", "trained", *size_names, *metrics)
    return "## Tasks\n\n" + _markdown(header, rows)


def _results(results: Mapping[str, Any]) -> str:
    averages = [(key, number(results[key], DECIMALS)) for key in results if key.count("/") == 1]
    if not averages:
        return "## Results\n\nThe run had no evaluation before this checkpoint."
    return (
        f"## Results\n\nMeans over the tasks, of the evaluation after {results['env_steps']:,}"
        f" environment steps:\n\n{_markdown(('metric', 'value'), averages)}"
    )


def _comparisons(formats: Mapping[str, Mapping[str, float]]) -> str:
    rows = [
        (
            f"`{POLICY_FILES[name]}` ({name})",
            f"{values['num_observations']:.0f}",
            f"{values['max_difference']:.1e}",
            f"{values['exported_microseconds']:.0f}",
            f"{values['policy_microseconds']:.0f}",
        )
        for name, values in formats.items()
    ]
    header = ("file", "observations", "largest difference", "µs per action", "µs of policy.act")
    return (
        "## Compared with the policy\n\nActions for drawn observations of all tasks, in one batch"
        f" and one by one; a difference above {TOLERANCE:g} is an error. Median times for one"
        f" observation on the CPU of the machine that exported it.\n\n{_markdown(header, rows)}"
    )


def _making(policy: LoadedPolicy, origin: Origin) -> str:
    lines = [
        "## How it was made\n",
        f"- algorithm: {policy.algorithm.summary}",
        f"- checkpoint: `{_shown_path(origin.checkpoint, origin)}`",
        f"- exported by: `{_shown_command(origin)}`",
    ]
    if origin.config:
        lines.append(f"- trained by: `mtrl-lightning fit -c {CONFIG}` (the file beside this card)")
    trained = trained_with(origin.run_folder)
    if trained:
        lines.append(f"- trained with: {_versions(trained)}")
    exported = {"python": platform.python_version(), "mtrl_lightning": __version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            exported[package] = importlib.metadata.version(package)
    return "\n".join([*lines, f"- exported with: {_versions(exported)}"])


def trained_with(run_folder: Path) -> dict[str, str]:
    """Return the versions that a run records, by package; empty if it records none."""
    return dict(read_run(run_folder).versions) if is_run(run_folder) else {}


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{package} {version}" for package, version in found.items())


def _shown_path(path: Path, origin: Origin) -> str:
    """Return a path without the folders of the machine: from the name of the run on."""
    root = origin.run_folder.resolve().parent.parent
    resolved = path.resolve()
    return resolved.relative_to(root).as_posix() if resolved.is_relative_to(root) else resolved.name


def _shown_command(origin: Origin) -> str:
    """Return the command that exported the policy, without the folders of the machine."""
    words = []
    for word in origin.command:
        option, separator, value = word.rpartition("=")
        shown = _shown_path(Path(value), origin) if Path(value).is_absolute() else value
        words.append(f"{option}{separator}{shown}")
    return shlex.join(words)


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _markdown(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    return markdown([[str(cell) for cell in line] for line in (header, *rows)])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
