"""Continue a run with another number of processes than its checkpoint has.

The list of all environments is the same for any number of processes. Each environment moves, with
its episode under way and its ring of the replay, to the process that now steps it. Each part of a
run says itself, by ``reshard``, which of its states a process takes over; see ``Share``.

Shapes: ``S`` steps of an iteration, ``E`` environments of one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.learning.metrics import MeanMetrics
from mtrl_lightning.ranks.states import (
    MOVED,
    RANKS,
    Origin,
    Rules,
    Share,
    join,
    manifests_of,
    parts_of,
    state_for,
    with_part,
)
from mtrl_lightning.run.session import Session
from mtrl_lightning.saved import HINT, restoring


def reshard(checkpoint: dict[str, Any], rank: int, size: int, session: Session) -> dict[str, Any]:
    """Return a checkpoint as one of ``size`` processes would have made it.

    Args:
        checkpoint: what was read, of any number of processes.
        rank: which of them.
        size: number of processes of this run.
        session: the run.

    Raises:
        ConfigurationError: if the environments cannot be shared out, an on-policy algorithm was in
            the middle of its updates, or what was read is not what processes have saved.
    """
    with restoring("states of its processes"):
        manifests_of(checkpoint)
        former_size = len(parts_of(checkpoint)) if RANKS in checkpoint else 1
        if former_size == size:
            return state_for(checkpoint, rank)
        parts = parts_of(checkpoint)
        share = _share_of([part["collector"]["tasks"] for part in parts], rank, size)
        part = join(
            "a process",
            parts,
            {
                "collector": partial(session.collector.reshard, share=share),
                "data": partial(_data, share=share),
                "algorithm": partial(_algorithm, session.algorithm, share=share),
                "extra_states": partial(_extra_states, session.algorithm, share=share),
            },
        )
    rank_zero_warn(
        f"the checkpoint is of {former_size} processes and this run has {size}: networks,"
        " optimizers, counters, environments in mid-episode and the replay are those of the"
        " checkpoint, and what is drawn from here on differs. It is not the uninterrupted run"
    )
    return with_part(checkpoint, part)


def _share_of(tasks: Sequence[list[int]], rank: int, size: int) -> Share:
    """Return what a process takes over.

    Args:
        tasks: the task of each environment, for each process of the checkpoint.
        rank: which process.
        size: number of processes now.

    Raises:
        ConfigurationError: if each cannot have the same number of environments of every task.
    """
    former_copies = tasks[0].count(tasks[0][0])
    distinct = list(dict.fromkeys(tasks[0]))
    wanted = [task for task in distinct for _ in range(former_copies)]
    if any(of_rank != wanted for of_rank in tasks):
        raise ConfigurationError(
            f"the checkpoint's processes have environments of tasks {str(tasks)[:100]}, and each"
            f" has to have the same number of every task: {HINT}"
        )
    copies, rest = divmod(former_copies * len(tasks), size)
    if rest:
        raise ConfigurationError(
            f"the checkpoint has {former_copies * len(tasks)} copies of each task, which {size}"
            " processes cannot share out: continue with a number of processes that divides it"
        )
    origins = []
    for task in range(len(distinct)):
        for copy in range(rank * copies, (rank + 1) * copies):
            former_rank, former_copy = divmod(copy, former_copies)
            origins.append(Origin(former_rank, task * former_copies + former_copy))
    return Share(rank, size, len(wanted), tuple(origins))


def _data(states: Sequence[Mapping[str, Any]], share: Share) -> dict[str, Any]:
    """Return what is learned from: an iteration, or which rings of which files are read."""
    rules: Rules = {
        "rollout_buffer": partial(_rollout_buffer, share=share),
        "replay": partial(_replay, share=share),
        "buffer": lambda buffers: share.own(buffers) or {},
    }
    return join("the data", states, rules)


def _replay(manifests: Sequence[dict[str, Any] | None], share: Share) -> dict[str, Any] | None:
    """Return which rings of which manifests become which rings of a rank."""
    moved = []
    for former_rank, manifest in enumerate(manifests):
        if not manifest:
            return None
        if len(manifest["added"]) != share.num_envs:
            raise ConfigurationError(
                f"the checkpoint's replay has {len(manifest['added'])} rings for"
                f" {share.num_envs} environments: {HINT}"
            )
        rings = [
            [origin.env, env]
            for env, origin in enumerate(share.origins)
            if origin.rank == former_rank
        ]
        moved.append({"manifest": manifest, "rings": rings})
    return {MOVED: moved}


def _rollout_buffer(states: Sequence[Mapping[str, Any]], share: Share) -> dict[str, Any]:
    def none(computed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if any(computed):
            raise ConfigurationError(
                "the checkpoint is in the middle of an iteration's updates, whose minibatches"
                f" belong to {len(states)} processes: continue with as many, or from another"
                " checkpoint"
            )
        return {}

    def columns(values: Sequence[Tensor]) -> Tensor:
        per_env = [list(value_SE.unbind(1)) for value_SE in values]
        return torch.stack(share.of_envs(per_env), 1)

    def arrays(of_ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return join("the transitions", of_ranks, dict.fromkeys(of_ranks[0], columns))

    def first(values: Sequence[Any]) -> Any:
        return values[0]

    rules: Rules = {
        "collection": first,
        "arrays": arrays,
        "valid": columns,
        "computed": none,
        "num_minibatches": first,
        "order": first,  # of an epoch that is over: the next one has its own
        "generator": share.own,
    }
    joined = join("the iteration", states, rules)
    # a process that was not there draws from its own seed
    return {name: value for name, value in joined.items() if value is not None}


def _algorithm(
    algorithm: Algorithm, states: Sequence[Mapping[str, Any]], share: Share
) -> dict[str, Any]:
    rules: Rules = {
        "generators": partial(algorithm.generators.reshard, share=share),
        "global_generators": lambda of_ranks: of_ranks[share.rank % len(of_ranks)],
        "metrics": partial(MeanMetrics.reshard, share=share),
    }
    return join("the algorithm", states, rules)


def _extra_states(
    algorithm: Algorithm, states: Sequence[Mapping[str, Any]], share: Share
) -> dict[str, Any]:
    """Return what modules save beside tensors; it is shared if a module has no ``reshard``."""
    modules = dict(algorithm.named_modules(remove_duplicate=False))
    found = {}
    for name in states[0]:
        of_ranks = [state[name] for state in states]
        rule = getattr(modules.get(name.rpartition(".")[0]), "reshard", None)
        found[name] = of_ranks[0] if rule is None else rule(of_ranks, share)
    return found
