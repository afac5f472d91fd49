"""Samples of a number of steps or episodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.transitions import Episode, Mode, SeededPolicy, Transitions

if TYPE_CHECKING:
    from mtrl_lightning.rollout.collector import Collector


class Sample(NamedTuple):
    """Result of ``Collector.sample``."""

    transitions: Transitions
    """All transitions, in chronological order."""
    episodes: list[Episode]
    """The episodes that finished in these steps."""
    weights_seq_no: int = 0
    """Number of updates of the policy's weights; 0 if the policy has no weights."""


def collect(
    collector: Collector,
    *,
    num_steps: int | None,
    num_episodes: int | None,
    mode: Mode,
    force_reset: bool,
    seed: int | Sequence[int] | None,
) -> Sample:
    """Collect a number of steps or episodes; see ``Collector.sample``."""
    if (num_steps is None) == (num_episodes is None):
        raise ConfigurationError("give either num_steps or num_episodes")
    at_least(1, num_steps=num_steps, num_episodes=num_episodes)
    is_fresh = force_reset or seed is not None or num_episodes is not None
    if seed is not None:
        seeds = np.random.SeedSequence(seed).generate_state(3).tolist()
        of_policy, of_exploration, of_reuse = seeds
        if isinstance(collector.policy, SeededPolicy):
            collector.policy.seed_actions(of_policy)
        if collector.exploration is not None:
            collector.exploration.seed(of_exploration)
        if collector.reuse is not None:
            collector.reuse.seed(of_reuse)
    if is_fresh or not collector.has_started:
        collector.reset(seed)
    weights_seq_no = collector.weights_seq_no

    num_envs = collector.envs.num_envs
    steps: Iterable[tuple[Transitions, dict[int, Episode]]]
    if num_episodes is not None:
        steps = collector.run_episodes(quotas(num_episodes, num_envs), mode)
    else:
        assert num_steps is not None
        num_vector_steps = -(-num_steps // num_envs)  # rounded up
        steps = (collector.step(mode) for _ in range(num_vector_steps))
    parts: list[Transitions] = []
    episodes: list[Episode] = []
    for transitions, ended in steps:
        parts.append(transitions)
        episodes += ended.values()

    sample = Sample(concatenated(parts), episodes, weights_seq_no)
    for listener in collector.listeners:
        listener.on_sample_end(sample)
    return sample


def quotas(total: int, num_envs: int) -> npt.NDArray[np.int64]:
    """Divide ``total`` episodes among environments as evenly as possible."""
    return np.array([total // num_envs + (e < total % num_envs) for e in range(num_envs)], np.int64)


def concatenated(parts: Sequence[Transitions]) -> Transitions:
    """Concatenate the transitions of several steps."""
    core = (np.concatenate(column) for column in zip(*(part[:-1] for part in parts), strict=True))
    extra = {name: np.concatenate([part.extra[name] for part in parts]) for name in parts[0].extra}
    return Transitions(*core, extra=extra)  # type: ignore[arg-type, misc]
