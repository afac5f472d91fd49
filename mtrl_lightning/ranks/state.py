"""The state of a run in a checkpoint, which is the same for any number of processes ("ranks").

Parts of a state that ranks do not share are marked by their keys:

- ``per_env``: lists or tensors with one entry per environment, also in nested dictionaries. A rank
  saves those of its own environments; a checkpoint has all of them, by the environment's index over
  all ranks; a rank loads those of the environments that it steps. A list may be shorter: further
  environments have no entry, which is None after loading.
- ``per_rank``: dictionaries ``{rank: value}``, such as the states of random generators. A rank
  saves and loads its own; one that the checkpoint does not have starts from the run's seed. Those
  of ranks that the run no longer has stay in its checkpoints.
- ``all_ranks``: lists. A checkpoint has those of all ranks one after another, and each rank loads
  all of them.

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
    """Return the state of a run from those of its ranks.

    Args:
        states: of all ranks.
        envs: the indices of each rank's environments over all ranks.
        absent: of ranks that the run no longer has; see ``of_absent_ranks``.
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
    """Return the state of a run with the entries of some environments only.

    Args:
        state: returned by ``gathered``.
        envs: the environments' indices over all ranks.
        num_envs: number of environments over all ranks.
    """

    def select(value: Any) -> Any:
        if len(value) != num_envs:
            raise ConfigurationError(
                f"the checkpoint has {len(value)} environments, this run {num_envs}: continue with"
                " the same tasks, data.envs_per_task and data.exclude_from_training"
            )
        return value[list(envs)] if isinstance(value, Tensor) else [value[env] for env in envs]

    if not isinstance(state, Mapping):
        return state
    return {
        key: _leaves(select, value) if key == PER_ENV else of_envs(value, envs, num_envs)
        for key, value in state.items()
    }


def of_absent_ranks(state: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return what a state has for each of the ranks from number ``size`` on."""
    result: dict[str, Any] = {}
    for key, value in state.items():
        if key == PER_RANK:
            result[key] = {rank: v for rank, v in value.items() if rank >= size}
        elif isinstance(value, Mapping):
            result[key] = of_absent_ranks(value, size)
    return result


def _leaves(function: Callable[..., Any], *trees: Any) -> Any:
    """Return nested dictionaries with a function of their values."""
    if not isinstance(trees[0], Mapping):
        return function(*trees)
    return {key: _leaves(function, *(tree[key] for tree in trees)) for key in trees[0]}


def _in_order(values: Sequence[Any], envs: Sequence[Sequence[int]]) -> Any:
    """Return the entries of all environments by their index."""
    order = np.argsort(np.concatenate(envs))
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))[order]
    rows = [
        row
        for value, of_rank in zip(values, envs, strict=True)
        for row in [*value, *[None] * (len(of_rank) - len(value))]
    ]
    return [rows[i] for i in order.tolist()]
