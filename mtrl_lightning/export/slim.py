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

import torch
import yaml

from mtrl_lightning.algorithms.description import summarize
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.export.card import last_evaluation
from mtrl_lightning.reports.record import is_run, read_run
from mtrl_lightning.runs import CARD, VALIDATIONS, ensure_writable, read_config, run_folder_of

CHECKPOINT = Path("checkpoints/best.ckpt")
"""The slim checkpoint in its folder."""
CONFIG = "config.yaml"
OF_STATE = ("format", "algorithm", "spec", "counters")
"""What is kept of the algorithm's state."""
OF_MACHINE = (
    ("root",),
    ("ckpt_path",),
    ("rollout", "num_workers"),
    ("rollout", "learner_threads"),
    ("evaluation", "num_workers"),
)
"""Options that belong to the machine, and are left out of the configuration."""


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
    file = folder / CHECKPOINT
    if file.resolve() == checkpoint.resolve():
        raise ConfigurationError(f"{folder} is the folder of {checkpoint} itself: give another")
    loaded = load_checkpoint(checkpoint)
    ensure_writable(file.parent)
    torch.save(_slim(loaded), file)
    card = _card(loaded, checkpoint) | {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    config = read_config(config_file)
    for path in OF_MACHINE:
        _remove(config, path)
    if "num_episodes" in card["evaluation"]:
        # validate repeats the evaluation whose result the card has
        config["evaluation"]["num_episodes"] = card["evaluation"]["num_episodes"]
    (folder / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    (folder / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return file


def _slim(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a checkpoint its policy and an evaluation need."""
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


def _card(loaded: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Return what there is to know about a policy."""
    run_folder = run_folder_of(checkpoint)
    state = loaded["mtrl_lightning"]
    spec = state["spec"]
    env_steps = state["counters"]["env_steps"]
    record = read_run(run_folder) if is_run(run_folder) else None
    result = _validation(run_folder, env_steps, spec["task_names"])
    if result is None:
        evaluated_at, metrics = last_evaluation(record.curves if record else {}, env_steps)
        result = {"by": "fit", "env_steps": evaluated_at, "metrics": metrics}
    return {
        "algorithm": summarize(state["algorithm"]),
        "command": f"mtrl-lightning fit -c {CONFIG}",
        "env_steps": env_steps,
        "tasks": spec["task_names"],
        "protocol": spec["protocol"],
        "evaluation": result,
        "versions": record.versions if record else {},
    }


def _validation(run_folder: Path, env_steps: int, tasks: list[str]) -> dict[str, Any] | None:
    """Return the last result of ``validate`` for all tasks at this step; None without one."""
    file = run_folder / VALIDATIONS
    if not file.is_file():
        return None
    results = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    same = [
        result
        for result in results
        if result["env_steps"] == env_steps
        and all(any(name.endswith(f"/{task}") for name in result["metrics"]) for task in tasks)
    ]
    if not same:
        return None
    kept = ("env_steps", "num_episodes", "protocol", "metrics")
    return {"by": "validate"} | {name: same[-1][name] for name in kept}
