"""Status that the processes of a run exchange after each vector step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mtrl_lightning.counters import Counters
from mtrl_lightning.ranks import distributed

if TYPE_CHECKING:
    from mtrl_lightning.run.session import Session


class RankStatus(NamedTuple):
    """Status of all processes of a run; the same on all of them."""

    signal: int = 0
    """Number of a signal that one of them has received; 0 for none."""
    faulty_rank: int | None = None
    """The first whose environments broke more often than they may be rebuilt."""
    is_stop_requested: bool = False
    """Whether something on one of them has asked the trainer to end the run."""
    restarts: int = 0
    """Groups of environments that were rebuilt on all of them since the program started."""


def sync_ranks(session: Session, wants_stop: bool) -> None:
    """Add up the counts of all processes, and exchange the requests of each.

    One process has nothing to exchange.

    Args:
        session: whose ``counters`` and ``rank_status`` are updated.
        wants_stop: whether something on this process has asked the trainer to end the run.
    """
    if distributed.world_size() == 1:
        return
    local = session.local_counters
    envs = session.collector.envs if session.has_envs else None
    local_numbers = [
        local.env_steps,
        local.dropped_transitions,
        local.episodes,
        local.worker_restarts,
        session.received_signal,
        int(envs is not None and envs.fault is not None),
        int(wants_stop),
        0 if envs is None else envs.num_restarts,
    ]
    numbers = np.array(distributed.gather_numbers(local_numbers))
    totals = numbers.sum(0).tolist()
    counters = session.counters
    counters.env_steps += totals[0]
    counters.dropped_transitions += totals[1]
    counters.episodes += totals[2]
    counters.worker_restarts += totals[3]
    counters.vector_steps += local.vector_steps  # in lockstep: every process has made as many
    local.load_state_dict(Counters().state_dict())
    faulty = np.flatnonzero(numbers[:, 5])
    session.rank_status = RankStatus(
        signal=int(numbers[:, 4].max()),
        faulty_rank=int(faulty[0]) if len(faulty) else None,
        is_stop_requested=bool(totals[6]),
        restarts=totals[7],
    )
