"""The standard deviation of a Gaussian policy, which determines exploration.

Shapes: ``B`` rows, ``T`` tasks, ``R`` trained tasks, ``A`` action, ``O`` outputs of an actor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.distributions import ClippedGaussian
from mtrl_lightning.networks.network import TaskAxis, TaskModule, task_values
from mtrl_lightning.spec import EnvSpec


class PolicyStd(TaskModule):
    """Learn a policy's log standard deviations, and map an actor's outputs to distributions.

    Built by a factory ``(spec) -> PolicyStd``. Each task and action dimension has one log standard
    deviation, clamped to its bounds after each optimizer step: a clamp in the forward pass would
    have no gradient beyond the bounds.

    Args:
        spec: the tasks.
        initial: initial log standard deviation.
        minimum: lower bound of the log standard deviation.
        maximum: upper bound of the log standard deviation.
    """

    outputs_per_action: ClassVar[int]
    """Number of actor outputs per action dimension."""

    def __init__(
        self,
        spec: EnvSpec,
        *,
        initial: float = 0.0,
        minimum: float = -2.3,
        maximum: float = 0.4,
    ) -> None:
        super().__init__()
        if not minimum <= initial <= maximum:
            raise ConfigurationError(
                f"the policy's initial log standard deviation is {initial}, its minimum {minimum},"
                f" its maximum {maximum}: give minimum <= initial <= maximum"
            )
        self.minimum = minimum
        self.maximum = maximum
        shape = (spec.num_tasks, spec.action_space.shape[0])
        self.log_std_TA = nn.Parameter(torch.full(shape, float(initial)))

    def forward(self, task_B: Tensor) -> Tensor:
        """Map tasks ``[B]`` to log standard deviations ``[B, A]``."""
        return task_values(self.log_std_TA, task_B)

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the log standard deviations."""
        return {"log_std_TA": TaskAxis()}

    def distribution(self, output_BO: Tensor, task_B: Tensor) -> ClippedGaussian:
        """Return the distribution for an actor's outputs ``[B, O]`` and tasks ``[B]``."""
        raise NotImplementedError

    @torch.no_grad()
    def after_step(self, loss_R: Tensor, task_R: Tensor, generator: torch.Generator) -> None:
        """Clamp the log standard deviations to their bounds."""
        self.log_std_TA.clamp_(self.minimum, self.maximum)


class StateIndependentStd(PolicyStd):
    """Learn one standard deviation per task and action dimension, the same in all states."""

    outputs_per_action = 1

    def distribution(self, output_BO: Tensor, task_B: Tensor) -> ClippedGaussian:
        """Return the distribution whose mean is the outputs."""
        return ClippedGaussian(output_BO.float(), self(task_B))


class StateDependentStd(PolicyStd):
    """Learn standard deviations that depend on the state.

    The second half of the actor's outputs is added to the task's log standard deviation; the sum is
    clamped to the bounds.
    """

    outputs_per_action = 2

    def distribution(self, output_BO: Tensor, task_B: Tensor) -> ClippedGaussian:
        """Return the distribution with mean and log std from the two halves of the outputs."""
        mean_BA, change_BA = output_BO.float().chunk(2, dim=-1)
        log_std_BA = self(task_B) + change_BA
        return ClippedGaussian(mean_BA, log_std_BA.clamp(self.minimum, self.maximum))
