"""The result of ``Collector.sample``, and the division of episodes among environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.types import Episode, Transitions


class Sample(NamedTuple):
    """Result of ``Collector.sample``."""

    transitions: Transitions
    """All transitions, in the order of their steps."""
    episodes: list[Episode]
    """The episodes that ended meanwhile."""
    weights_seq_no: int = 0
    """Number of updates that the weights which acted have had; 0 if the policy has no weights."""


def quotas(total: int, num_envs: int) -> npt.NDArray[np.int64]:
    """Share ``total`` episodes out among environments as evenly as can be."""
    return np.array([total // num_envs + (e < total % num_envs) for e in range(num_envs)], np.int64)


def concatenated(parts: Sequence[Transitions]) -> Transitions:
    """Return the transitions of several steps, one after the other."""
    core = (np.concatenate(column) for column in zip(*(part[:-1] for part in parts), strict=True))
    extra = {name: np.concatenate([part.extra[name] for part in parts]) for name in parts[0].extra}
    return Transitions(*core, extra=extra)  # type: ignore[arg-type, misc]
