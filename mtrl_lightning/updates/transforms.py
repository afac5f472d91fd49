"""Transforms of transitions before an algorithm learns from them.

``Transform`` is the base class, and ``Transforms`` an algorithm's list of them. A ``RewardScale``
normalizes the tasks' rewards to a common scale.

Shapes: ``T`` tasks, ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks or ``R, n``,
``D`` observation, ``E`` environments of one vector step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch, Transitions
from mtrl_lightning.updates.generators import Generators


class Transform(nn.Module):
    """Transform sampled batches, such as their rewards; built by a factory ``(spec) -> Transform``.

    The replay stores untransformed transitions, so updated statistics apply to all of them. Return
    state per environment from ``get_extra_state`` as lists under the key ``per_env``; see
    ``mtrl_lightning.checkpoints``.

    Args:
        spec: the tasks.
    """

    generator: Callable[[torch.device], torch.Generator]
    """Returns the transform's own generator on a device, which is part of checkpoints.
    ``Transforms.add`` sets it; each process samples different numbers."""
    quantities: Mapping[str, Callable[[], Tensor]]
    """Quantities of the algorithm by name: ``temperature_T`` and ``target_entropy_T``."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()

    def observe(self, transitions: Transitions) -> None:
        """Observe the transitions of one vector step, in chronological order.

        Each process receives those of its own environments, but all processes must compute the same
        statistics: see ``mtrl_lightning.ranks.distributed``.
        """

    def drop_episodes(self, env_N: npt.NDArray[np.int64]) -> None:
        """Discard the current episodes of environments that were rebuilt after a fault."""

    def sync_ranks(self) -> None:
        """Synchronize statistics that ``observe`` updates at the end of episodes.

        Called on all ranks after an episode has ended on any of them.
        """

    def begin_learning(self, mean_reward_R: npt.NDArray[np.float64]) -> None:
        """Observe each trained task's mean reward in the replay.

        Called before the first update and whenever the networks are reset.
        """

    def forward(self, batch: TransitionBatch) -> TransitionBatch:
        """Return the batch to learn from; the base class returns it unchanged."""
        return batch


class Transforms(nn.ModuleList):
    """The transforms of an algorithm, in order; ``add`` appends one."""

    def __init__(self) -> None:
        super().__init__()
        self.quantities: dict[str, Callable[[], Tensor]] = {}
        """Quantities of the algorithm that transforms may use, by name."""

    def add(self, transform: Transform, generators: Generators) -> None:
        """Append a transform, which gets its own generator.

        Args:
            transform: the transform.
            generators: the algorithm's generators.
        """
        name = f"transform_{len(self)}"
        generators.per_rank.add(name)
        transform.generator = partial(generators.get, name)
        transform.quantities = self.quantities
        self.append(transform)

    def __iter__(self) -> Iterator[Transform]:
        """Iterate over the transforms in order."""
        return super().__iter__()  # type: ignore[return-value]

    def observe(self, transitions: Transitions, has_ended: bool = True) -> None:
        """Observe the transitions of one vector step, in chronological order.

        Args:
            transitions: transitions of this rank's environments.
            has_ended: whether an episode may have ended in this step, on any rank.
        """
        for transform in self:
            transform.observe(transitions)
            if has_ended:
                transform.sync_ranks()

    def drop_episodes(self, env_N: npt.NDArray[np.int64]) -> None:
        """Call ``Transform.drop_episodes`` of each transform."""
        for transform in self:
            transform.drop_episodes(env_N)

    def begin_learning(self, mean_reward_R: npt.NDArray[np.float64]) -> None:
        """Receive each trained task's mean reward in the replay.

        Called before the first update and whenever the networks are reset.
        """
        for transform in self:
            transform.begin_learning(mean_reward_R)

    def forward(self, batch: TransitionBatch) -> TransitionBatch:
        """Apply all transforms."""
        for transform in self:
            batch = transform(batch)
        return batch


class RewardScale(Transform):
    """Scale rewards when they are sampled; built by a factory ``(spec) -> RewardScale``.

    The base class leaves them unchanged.

    Args:
        spec: the tasks.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self._train_tasks = list(spec.train_tasks)

    def check(self, discount: float) -> None:
        """Check that the scale is compatible with the critic's discount."""

    def forward(self, batch: TransitionBatch) -> TransitionBatch:
        """Return the batch with scaled rewards."""
        factor_T = self.factors()
        if factor_T is None:
            return batch
        return batch._replace(reward_Rn=batch.reward_Rn * factor_T[batch.task_R1])

    def factors(self) -> Tensor | None:
        """Return the factor of each task's rewards, ``[T]``; None for 1."""
        return None
