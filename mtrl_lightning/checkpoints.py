"""Reading checkpoint files, and their structure. No code in them is executed."""

from __future__ import annotations

import copy
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
from mtrl_lightning.runs import is_whole
from mtrl_lightning.spec import EnvSpec

FORMAT = 4
"""Version of the checkpoint's format."""
SECTIONS = ("callbacks", "loops", "lr_schedulers", "optimizer_states", "state_dict")
"""The sections of a checkpoint that Lightning reads."""
DAMAGED = (
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""Exceptions raised when restoring damaged files, or files of other versions."""
OTHER_CAUSES = (
    ConfigurationError,
    EnvironmentFaultError,
    torch.OutOfMemoryError,
)
"""Subclasses of these exceptions that have other causes."""


@contextmanager
def restoring(path: str | Path | None) -> Iterator[None]:
    """Convert errors while restoring into a ``ConfigurationError`` that names the checkpoint.

    Args:
        path: the checkpoint; None if there is none to restore.
    """
    try:
        yield
    except OTHER_CAUSES:
        raise
    except DAMAGED as error:
        if path is None:
            raise
        message = " ".join(str(error).split())
        raise ConfigurationError(
            f"the checkpoint {path} is damaged or from another version"
            f" ({type(error).__name__}: {message[:300]}): use another checkpoint"
        ) from error


def load_checkpoint(path: str | Path, verify: bool = True, mmap: bool = True) -> dict[str, Any]:
    """Read a checkpoint's tensors and plain values without executing code.

    Args:
        path: the file.
        verify: whether to verify the checksums, which reads the entire file.
        mmap: whether to memory-map tensors instead of reading them.
    """
    if not Path(path).is_file():
        raise ConfigurationError(
            f"checkpoint {path} does not exist: give a file in a run's checkpoints/ folder"
        )
    with restoring(path):
        if verify and not is_whole(path):
            raise zipfile.BadZipFile("a checksum is wrong, or the file is incomplete")
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    state = loaded.get("mtrl_lightning") if isinstance(loaded, dict) else None
    if not isinstance(state, dict) or "format" not in state:
        raise ConfigurationError(
            f"{path} was not written by mtrl_lightning: give a checkpoint of a run"
        )
    if state["format"] != FORMAT:
        raise ConfigurationError(
            f"the checkpoint {path} has format {state['format']}, but this version reads {FORMAT}:"
            " use the version that wrote it"
        )
    return loaded


def env_steps_of(checkpoint: dict[str, Any]) -> int:
    """Return the environment steps of a loaded checkpoint."""
    env_steps: int = checkpoint["mtrl_lightning"]["counters"]["env_steps"]
    return env_steps


def check_complete(checkpoint: dict[str, Any]) -> None:
    """Check that a checkpoint contains the full training state, not only the policy."""
    missing = [name for name in SECTIONS if name not in checkpoint]
    if missing:
        raise ConfigurationError(
            f"the checkpoint has no {', '.join(missing)}, so that no run can resume from it: give"
            " a file in a run's checkpoints/ folder, or start a new run with --init_from"
        )


def check_tasks(checkpoint: Mapping[str, Any], spec: EnvSpec) -> None:
    """Check that a loaded checkpoint has these tasks."""
    saved = EnvSpec.from_dict(checkpoint["mtrl_lightning"]["spec"])
    if saved.task_names != spec.task_names:
        raise ConfigurationError(
            f"the checkpoint is of other tasks: {', '.join(saved.task_names)} instead of"
            f" {', '.join(spec.task_names)}; use the config.yaml in its run's folder. To evaluate"
            " some of its tasks, use validate RUN --tasks TASK ...; to train these tasks with its"
            " weights, start a new run with fit --init_from CHECKPOINT (Python: init_from)"
        )
    for task, name in enumerate(spec.task_names):
        if saved.shapes_of(task) != spec.shapes_of(task):
            raise ConfigurationError(
                f"the checkpoint is of tasks of other sizes: observation and action of {name!r}"
                f" have shapes {saved.shapes_of(task)} in the checkpoint and"
                f" {spec.shapes_of(task)} in this run; use the config.yaml in its run's folder"
            )


RANKS = "ranks"
"""Key of the list of all ranks' parts, before they are written."""
OF_ALGORITHM = ("generators", "global_generators", "metrics")
EXTRA_STATE = "_extra_state"
"""Suffix of the keys of modules' extra state, such as episode returns."""


def data_key(checkpoint: Mapping[str, Any]) -> str:
    """Return the key of the data module's state: its class name, as in Lightning."""
    key: str = checkpoint["mtrl_lightning"]["data"]
    return key


def part_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that may differ between ranks."""
    algorithm = checkpoint["mtrl_lightning"]
    return {
        "data": checkpoint.get(data_key(checkpoint), {}),
        "algorithm": {name: algorithm[name] for name in OF_ALGORITHM if name in algorithm},
        "extra_states": {
            name: value
            for name, value in checkpoint["state_dict"].items()
            if name.endswith(EXTRA_STATE)
        },
    }


def with_part(checkpoint: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with its part replaced."""
    state_dict = copy.copy(checkpoint["state_dict"])  # keeps its class and version metadata
    state_dict.update(part["extra_states"])
    return {
        **checkpoint,
        data_key(checkpoint): part["data"],
        "mtrl_lightning": {**checkpoint["mtrl_lightning"], **part["algorithm"]},
        "state_dict": state_dict,
    }


def manifest_of(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of the replay files that a checkpoint needs; None if it needs none."""
    if "data" not in checkpoint.get("mtrl_lightning", {}):
        return None  # an exported policy, or an algorithm trained without a data module
    manifest: dict[str, Any] | None = checkpoint.get(data_key(checkpoint), {}).get("replay")
    return manifest
