"""A trained policy without the state of its training: a small folder, laid out as a run's.

It holds ``checkpoints/best.ckpt`` with the weights, ``config.yaml``, and ``policy.json``, the card.
Commands that take a run's folder take it as well, but for continuing the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from mtrl_lightning.algorithms.description import summarize
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.reports.record import UPDATES, is_evaluation, is_run, read_run, step_unit
from mtrl_lightning.runs import (
    CARD,
    VALIDATIONS,
    ensure_writable,
    read_card,
    read_config,
    replacing,
    run_folder_of,
)

CHECKPOINT = Path("checkpoints/best.ckpt")
"""The slim checkpoint in its folder."""
CONFIG = "config.yaml"
OF_STATE = ("format", "algorithm", "spec", "counters")
"""What is kept of the algorithm's state."""
OF_MACHINE = (
    ("root",),
    ("ckpt_path",),
    ("init_from",),
    ("trainer", "default_root_dir"),
    ("data", "demonstrations"),
    ("rollout", "num_workers"),
    ("rollout", "learner_threads"),
    ("evaluation", "num_workers"),
)
"""Options that belong to the machine or name its files, and are left out of the configuration."""
OF_RESULT = ("env_steps", "num_episodes", "protocol", "metrics")
"""What is kept of a line of ``validations.jsonl``."""


def write_slim(checkpoint: Path, config_file: Path, folder: Path) -> Path:
    """Write the policy of a checkpoint, its configuration and its card.

    Args:
        checkpoint: in the folder of its run.
        config_file: the run's configuration.
        folder: where to write.

    Returns:
        The slim checkpoint.

    Raises:
        ConfigurationError: if the checkpoint cannot be read, or the folder holds another policy.
        OSError: if a file cannot be written.
    """
    _check_folder(folder, run_folder_of(checkpoint))
    loaded = load_checkpoint(checkpoint)
    config = read_config(config_file)
    card = _card(loaded, checkpoint, config)
    for path in OF_MACHINE:
        _remove(config, path)
    if "num_episodes" in card["evaluation"]:
        # validate repeats the evaluation whose result the card has
        config["evaluation"]["num_episodes"] = card["evaluation"]["num_episodes"]
    file = folder / CHECKPOINT
    ensure_writable(file.parent)
    with replacing(file) as unfinished:
        torch.save(_slim(loaded), unfinished)
    card["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    texts = {CONFIG: yaml.safe_dump(config, sort_keys=False), CARD: json.dumps(card, indent=1)}
    for name, text in texts.items():
        with replacing(folder / name) as unfinished:
            unfinished.write_text(text.rstrip() + "\n", encoding="utf-8")
    return file


def _check_folder(folder: Path, source: Path) -> None:
    """Refuse to write over the exported policy itself, or over a run."""
    if folder.resolve() == source.resolve():
        raise ConfigurationError(f"{folder} is the folder that is exported: give another --folder")
    is_run = (folder / CONFIG).exists() or (folder / CHECKPOINT).parent.exists()
    if is_run and not (folder / CARD).is_file():
        raise ConfigurationError(
            f"{folder} is the folder of a run, which would be lost: give another --folder"
        )


def _slim(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a checkpoint that its policy and an evaluation need."""
    state = {name: loaded["mtrl_lightning"][name] for name in OF_STATE}
    fresh = {
        "generators": {"seed": 0, "used": {}},
        "metrics": {"sums": {}, "counts": {}},
    }
    return {
        "pytorch-lightning_version": loaded["pytorch-lightning_version"],
        "state_dict": loaded["state_dict"],
        "mtrl_lightning": state | fresh,
    }


def _remove(config: dict[str, Any], path: tuple[str, ...]) -> None:
    """Remove an option, if it is there."""
    *sections, name = path
    for section in sections:
        config = config.get(section) or {}
    config.pop(name, None)


def _card(loaded: Mapping[str, Any], checkpoint: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card of a policy.

    Args:
        loaded: the checkpoint.
        checkpoint: its path, in the folder of its run or of another slim policy.
        config: of the run.
    """
    folder = run_folder_of(checkpoint)
    state = loaded["mtrl_lightning"]
    env_steps = state["counters"]["env_steps"]
    before = read_card(folder) if (folder / CARD).is_file() else {}
    record = read_run(folder) if is_run(folder) else None
    result = _validation(folder, env_steps, state["spec"]) or before.get("evaluation")
    if result is None:
        evaluated_at, metrics = _last_evaluation(record.curves if record else {}, env_steps)
        result = {"by": "fit", "env_steps": evaluated_at, "metrics": metrics}
    return {
        "algorithm": summarize(state["algorithm"]),
        "command": before.get("command") or _command(config),
        "env_steps": env_steps,
        "step_unit": before.get("step_unit") or step_unit(config),
        "tasks": state["spec"]["task_names"],
        "protocol": state["spec"]["protocol"],
        "evaluation": result,
        "versions": record.versions if record else before.get("versions", {}),
    }


def _last_evaluation(curves: Mapping[str, Any], env_steps: int) -> tuple[int, dict[str, float]]:
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


def _command(config: Mapping[str, Any]) -> str:
    """Return the command that trained a policy; the files that it needs beside have no path."""
    command = f"mtrl-lightning fit -c {CONFIG}"
    if config.get("init_from"):
        command += " --init_from POLICY"
    if step_unit(config) == UPDATES:
        command += " --data.demonstrations COLLECTION"
    return command


def _validation(folder: Path, env_steps: int, spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the last result of ``validate`` of these weights by the run's own protocol.

    Args:
        folder: of the run.
        env_steps: of the checkpoint.
        spec: of its tasks, all of which have to be evaluated.
    """
    file = folder / VALIDATIONS
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    for line in reversed(lines):
        try:
            result = json.loads(line)
            kept = {name: result[name] for name in OF_RESULT}
        except (ValueError, TypeError, KeyError):  # a damaged line
            continue
        is_of_all = all(
            any(name.endswith(f"/{task}") for name in kept["metrics"])
            for task in spec["task_names"]
        )
        if kept["env_steps"] == env_steps and kept["protocol"] == spec["protocol"] and is_of_all:
            return {"by": "validate"} | kept
    return None
