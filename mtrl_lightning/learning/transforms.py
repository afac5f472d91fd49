"""Changes of transitions before an algorithm learns from them.

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks or ``R, n``, ``D``
observation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.types import TransitionBatch, Transitions

if TYPE_CHECKING:
    from mtrl_lightning.ranks.share import Share


class Transform(nn.Module):
    """Change sampled batches, such as their rewards; built by a factory ``(spec) -> Transform``.

    The replay keeps transitions as received, so a transform whose numbers change applies to all of
    it.

    Args:
        spec: the tasks.
    """

    requires: ClassVar[tuple[str, ...]] = ()
    """Quantities of the algorithm that ``forward`` takes besides the batch, by name: see
    ``Algorithm.quantities``."""

    generator: Callable[[torch.device], torch.Generator]
    """Returns the transform's own generator on a device, which is saved with checkpoints.
    The algorithm sets it; with several processes each samples other numbers."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()

    def observe(self, transitions: Transitions) -> None:
        """Receive the transitions of one vector step, in the order in which they happen.

        With several processes each receives its own environments', and all have to come to the same
        numbers: see ``mtrl_lightning.ranks.distributed``.
        """

    def sync_ranks(self) -> None:
        """Come to the same numbers on all ranks, where ``observe`` changes them by whole episodes.

        Called on all ranks after an episode has ended on any of them.
        """

    @staticmethod
    def reshard(states: Sequence[Any], share: Share) -> Any:
        """Return one process' extra state when a run continues with another number of them.

        Here it is the same on all processes. A transform whose ``get_extra_state`` has something
        for each environment overrides this.

        Args:
            states: of ``get_extra_state`` on all processes of the checkpoint.
            share: the rank, and the environments that it takes over.
        """
        return states[0]

    def begin_learning(self, mean_reward_R: npt.NDArray[np.float64]) -> None:
        """Receive each trained task's mean reward in the replay.

        Called before the first update and whenever the networks are reset.
        """

    def observation(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the observations ``[B, D]`` that the policy acts on."""
        return observation_BD

    def forward(self, batch: TransitionBatch, **quantities: Tensor) -> TransitionBatch:
        """Return the batch to learn from; here its observations are changed as in acting."""
        return batch._replace(
            observation_RnD=self.observation(batch.observation_RnD, batch.task_Rn),
            next_observation_RnD=self.observation(batch.next_observation_RnD, batch.task_Rn),
        )


class Transforms(nn.ModuleList):
    """The transforms of an algorithm, in their order."""

    def __iter__(self) -> Iterator[Transform]:
        """Iterate over the transforms."""
        return super().__iter__()  # type: ignore[return-value]

    def observe(self, transitions: Transitions, has_ended: bool) -> None:
        """Receive a vector step; see ``Algorithm.observe``."""
        for transform in self:
            transform.observe(transitions)
            if has_ended:
                transform.sync_ranks()

    def begin_learning(self, mean_reward_R: npt.NDArray[np.float64]) -> None:
        """Receive each trained task's mean reward in the replay."""
        for transform in self:
            transform.begin_learning(mean_reward_R)

    def observation(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the observations ``[B, D]`` that the policy acts on."""
        for transform in self:
            observation_BD = transform.observation(observation_BD, task_B)
        return observation_BD

    def forward(
        self, batch: TransitionBatch, quantities: Mapping[str, Callable[[], Tensor]]
    ) -> TransitionBatch:
        """Return the batch after all transforms, each with the quantities that it requires."""
        for transform in self:
            required = {name: quantities[name]() for name in transform.requires}
            batch = transform(batch, **required)
        return batch
