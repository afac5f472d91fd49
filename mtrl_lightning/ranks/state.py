"""The state of a run in a checkpoint, independent of the number of processes ("ranks").

State that differs between ranks is marked by its keys:

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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrl_lightning.errors import ConfigurationError

PER_ENV = "per_env"
PER_RANK = "per_rank"
ALL_RANKS = "all_ranks"


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
