"""Rewards divided by the standard deviation of a task's returns.

Shapes: ``T`` tasks, ``E`` environments of one vector step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.checks import above, within
from mtrl_lightning.networks import TaskAxis
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.state import PER_ENV
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch, Transitions
from mtrl_lightning.updates.transforms import RewardScale, check_discount
from mtrl_lightning.utils.moments import union


class Moments:
    """Mean and variance of all values of each task so far, in double precision on the CPU.

    With several processes, they include the values of all processes. A task without values has mean
    0 and variance 1.

    Args:
        num_tasks: number of tasks, ``T``.
    """

    def __init__(self, num_tasks: int) -> None:
        self.count_T = torch.zeros(num_tasks, dtype=torch.float64)
        self.mean_T = torch.zeros(num_tasks, dtype=torch.float64)
        self.variance_T = torch.ones(num_tasks, dtype=torch.float64)

    def add(self, value_E: npt.NDArray, task_E: npt.NDArray[np.int64]) -> None:
        """Add values of these tasks."""
        values = torch.as_tensor(value_E, dtype=torch.float64)
        tasks = torch.as_tensor(task_E)
        number_T = torch.bincount(tasks, minlength=len(self.count_T)).double()
        # a task without values has weight 0 and sums of 0
        divisor_T = number_T.clamp(min=1)
        mean_T = torch.zeros_like(self.mean_T).index_add_(0, tasks, values) / divisor_T
        square_E = (values - mean_T[tasks]).square()
        variance_T = torch.zeros_like(self.mean_T).index_add_(0, tasks, square_E) / divisor_T
        mean_T, variance_T, number_T = distributed.merged_moments(mean_T, variance_T, number_T)
        self.count_T += number_T
        weight_T = number_T / self.count_T.clamp(min=1)
        self.mean_T, self.variance_T = union(
            self.mean_T, self.variance_T, mean_T, variance_T, weight_T
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the numbers of values, the means and the variances."""
        moments = {"count": self.count_T, "mean": self.mean_T, "variance": self.variance_T}
        return {name: value.clone() for name, value in moments.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore numbers of values, means and variances."""
        self.count_T = state["count"].cpu().clone()
        self.mean_T = state["mean"].cpu().clone()
        self.variance_T = state["variance"].cpu().clone()


class NormalizeReward(RewardScale):
    """Divide rewards by the standard deviation of the task's discounted returns so far.

    The return of a step is ``G_t = discount G_(t-1) + r_t``, from the start of its episode, as
    in ``VecNormalize`` (Engstrom et al. 2020, arXiv 2005.12729). Rewards keep their sign: no mean
    is subtracted.

    Args:
        spec: the tasks.
        discount: gamma of the returns; must equal the critic's.
        clip: largest absolute value of a reward after the division, above 0; 10 in
            Stable-Baselines3.
        epsilon: added to the variances, above 0; 1e-8 in Stable-Baselines3.
    """

    factor_T: Tensor

    def __init__(
        self, spec: EnvSpec, discount: float = 0.99, clip: float = 10.0, epsilon: float = 1e-8
    ) -> None:
        super().__init__(spec)
        above(0, clip=clip, epsilon=epsilon)
        within(0, 1, discount=discount)
        self._discount = discount
        self._clip = clip
        self._epsilon = epsilon
        self.moments = Moments(spec.num_tasks)
        """Statistics of all returns so far."""
        self._return_E = np.zeros(0)
        """Return so far of each environment's current episode."""
        self.register_buffer("factor_T", torch.ones(spec.num_tasks), persistent=False)

    def check(self, discount: float) -> None:
        """Check that the discount equals the critic's."""
        check_discount(self._discount, discount)

    def observe(self, transitions: Transitions) -> None:
        """Add the returns up to these steps."""
        env_E = transitions.env_E
        more_envs = max(int(env_E.max(initial=-1)) + 1 - len(self._return_E), 0)
        self._return_E = np.pad(self._return_E, (0, more_envs))
        return_E = self._discount * self._return_E[env_E] + transitions.reward_E
        self.moments.add(return_E, transitions.task_E)
        done_E = transitions.terminated_E | transitions.truncated_E
        self._return_E[env_E] = np.where(done_E, 0.0, return_E)
        self._use_moments()

    def drop_episodes(self, env_N: npt.NDArray[np.int64]) -> None:
        """Restart the returns of these environments' episodes."""
        self._return_E[env_N[env_N < len(self._return_E)]] = 0.0

    def factors(self) -> Tensor:
        """Return the reciprocals of the standard deviations."""
        return self.factor_T

    def forward(self, batch: TransitionBatch) -> TransitionBatch:
        """Return the batch with normalized rewards."""
        batch = super().forward(batch)
        return batch._replace(reward_Rn=batch.reward_Rn.clamp(-self._clip, self._clip))

    def get_extra_state(self) -> dict[str, Any]:
        """Return the statistics, and the returns of the current episodes."""
        return {**self.moments.state_dict(), PER_ENV: {"returns": self._return_E.tolist()}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore statistics and returns."""
        self.moments.load_state_dict(state)
        # None for environments without a step so far
        self._return_E = np.array([value or 0.0 for value in state[PER_ENV]["returns"]])
        self._use_moments()

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the statistics."""
        names = [f"_extra_state.{name}" for name in self.moments.state_dict()]
        return dict.fromkeys(names, TaskAxis(has_mean=False))

    def _use_moments(self) -> None:
        factor_T = (self.moments.variance_T + self._epsilon).rsqrt()
        self.factor_T.copy_(factor_T.float(), non_blocking=True)
