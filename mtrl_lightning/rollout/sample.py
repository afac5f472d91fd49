"""Samples of a number of steps or episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.transitions import Episode, Transitions


class Sample(NamedTuple):
    """Result of ``Collector.sample``."""

    transitions: Transitions
    """All transitions, in chronological order."""
    episodes: list[Episode]
    """The episodes that finished in these steps."""
    weights_seq_no: int = 0
    """Number of updates of the policy's weights; 0 if the policy has no weights."""


def quotas(total: int, num_envs: int) -> npt.NDArray[np.int64]:
    """Divide ``total`` episodes among environments as evenly as possible."""
    return np.array([total // num_envs + (e < total % num_envs) for e in range(num_envs)], np.int64)


def concatenated(parts: Sequence[Transitions]) -> Transitions:
    """Concatenate the transitions of several steps."""
    core = (np.concatenate(column) for column in zip(*(part[:-1] for part in parts), strict=True))
    extra = {name: np.concatenate([part.extra[name] for part in parts]) for name in parts[0].extra}
    return Transitions(*core, extra=extra)  # type: ignore[arg-type, misc]
