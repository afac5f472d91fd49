"""Reading checkpoint files, and their structure. No code in them is executed.

The state of a run is independent of the number of processes ("ranks"). State that differs between
ranks is marked by its keys:

- ``per_env``: lists or tensors with one entry per environment, also in nested dictionaries. A rank
  saves those of its own environments; a checkpoint has all of them, by the environment's global
  index; a rank loads those of the environments that it steps. Lists may be shorter: missing entries
  are None after loading.
- ``per_rank``: dictionaries ``{rank: value}``, such as the states of random generators. A rank
  saves and loads its own; one without an entry starts from the run's seed. Entries of ranks that no
  longer exist are kept in checkpoints.
- ``all_ranks``: lists, which a checkpoint concatenates over ranks, and of which each rank loads
  all entries.

Everything else is equal on all ranks.
"""

from __future__ import annotations

import copy
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrl_lightning.errors import ConfigurationError, EnvironmentFaultError
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


def load_checkpoint(path: str | Path, mmap: bool = True) -> dict[str, Any]:
    """Read a checkpoint's tensors and plain values, verifying checksums and executing no code.

    Args:
        path: the file.
        mmap: whether to memory-map tensors instead of reading them.
    """
    if not Path(path).is_file():
        raise ConfigurationError(
            f"checkpoint {path} does not exist: give a file in a run's checkpoints/ folder"
        )
    with restoring(path):
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                raise zipfile.BadZipFile("a checksum is wrong")
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


PER_ENV = "per_env"
PER_RANK = "per_rank"
ALL_RANKS = "all_ranks"
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


def gathered(
    states: Sequence[Any], envs: Sequence[Sequence[int]], absent: Mapping[str, Any]
) -> Any:
    """Merge the states of all ranks into the state of the run.

    Args:
        states: states of all ranks.
        envs: global indices of each rank's environments.
        absent: state of ranks that no longer exist; see ``of_absent_ranks``.
    """
    first = states[0]
    if not isinstance(first, Mapping):
        return first
    result: dict[str, Any] = {}
    for key in first:
        values = [state[key] for state in states]
        if key == PER_ENV:
            result[key] = _leaves(lambda *of_ranks: _in_order(of_ranks, envs), *values)
        elif key == PER_RANK:
            result[key] = {rank: v for value in values for rank, v in value.items()}
            result[key] |= absent.get(key, {})
        elif key == ALL_RANKS:
            result[key] = {
                name: [v for value in values for v in value[name]] for name in first[key]
            }
        else:
            result[key] = gathered(values, envs, absent.get(key, {}))
    return result


def of_envs(state: Any, envs: Sequence[int], num_envs: int) -> Any:
    """Select the entries of some environments from the state of a run.

    Args:
        state: state returned by ``gathered``.
        envs: global indices of the environments.
        num_envs: number of environments over all ranks.
    """

    def select(value: Any) -> Any:
        if len(value) != num_envs:
            raise ConfigurationError(
                f"the checkpoint has {len(value)} environments, but this run has {num_envs}: resume"
                " with the same tasks, data.envs_per_task and data.exclude_from_training"
            )
        return value[list(envs)] if isinstance(value, Tensor) else [value[env] for env in envs]

    if not isinstance(state, Mapping):
        return state
    return {
        key: _leaves(select, value) if key == PER_ENV else of_envs(value, envs, num_envs)
        for key, value in state.items()
    }


def of_absent_ranks(state: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the entries of a state for ranks from ``size`` on."""
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key == PER_RANK:
            result[key] = {rank: v for rank, v in value.items() if rank >= size}
        elif isinstance(value, Mapping):
            result[key] = of_absent_ranks(value, size)
    return result


def _leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """Apply a function to the values of nested dictionaries."""
    if not isinstance(trees[0], Mapping):
        return function(*trees)
    return {key: _leaves(function, *(tree[key] for tree in trees)) for key in trees[0]}


def _in_order(values: Sequence[Any], envs: Sequence[Sequence[int]]) -> Any:
    """Return the entries of all environments, sorted by index."""
    order = np.argsort(np.concatenate(envs))
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))[order]
    rows = [
        row
        for value, of_rank in zip(values, envs, strict=True)
        for row in [*value, *[None] * (len(of_rank) - len(value))]
    ]
    return [rows[i] for i in order.tolist()]
