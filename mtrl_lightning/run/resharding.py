"""Resume a run with another number of processes ("ranks") than its checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from mtrl_lightning.algorithms.state import reshard_extra_states, reshard_state
from mtrl_lightning.checkpoints.parts import RANKS, manifests_of, parts_of, with_part
from mtrl_lightning.ranks.share import Rules, Share, share_of
from mtrl_lightning.saved import restoring

if TYPE_CHECKING:
    from mtrl_lightning.run.session import Session


def reshard(checkpoint: dict[str, Any], rank: int, size: int, session: Session) -> dict[str, Any]:
    """Return a checkpoint as one of ``size`` ranks would have written it.

    Args:
        checkpoint: a loaded checkpoint, of any number of ranks.
        rank: the rank.
        size: number of ranks of this run.
        session: the run, whose parts split and join their own states.

    Raises:
        ConfigurationError: if the environments cannot be shared out, an on-policy algorithm was in
            the middle of its updates, or the parts are damaged.
    """
    with restoring("states of its processes"):
        manifests_of(checkpoint)
        if RANKS not in checkpoint and size == 1:
            return checkpoint
        parts = parts_of(checkpoint)
        if len(parts) == size:
            return with_part(checkpoint, parts[rank])
        share = Share(rank, size, 0, ())  # of an offline algorithm, which has no environments
        if "demonstrations" not in parts[0]["data"]:
            share = share_of([part["collector"]["tasks"] for part in parts], rank, size)
        part = _joined(session, parts, share)
    rank_zero_warn(
        f"the checkpoint is of {len(parts)} processes and this run has {size}: networks,"
        " optimizers, counters, current episodes and the replay are those of the checkpoint, and"
        " random numbers differ from here on. It is not the uninterrupted run"
    )
    return with_part(checkpoint, part)


def _joined(session: Session, parts: Sequence[Mapping[str, Any]], share: Share) -> dict[str, Any]:
    """Return a rank's part of a checkpoint from the parts of all saved ranks."""
    rules: Rules = {
        # an offline algorithm has no environments, and so no state of a collector
        "collector": lambda states: session.collector.reshard(states, share) if states[0] else {},
        "data": partial(session.data.reshard, share=share),
        "algorithm": partial(reshard_state, session.algorithm, share=share),
        "extra_states": partial(reshard_extra_states, session.algorithm, share=share),
    }
    return share.join("a process", parts, rules)
