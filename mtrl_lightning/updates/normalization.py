"""Transforms that normalize by running statistics, one set per task.

They are those of Stable-Baselines3's ``VecNormalize``, except that the replay keeps raw
values: sampled batches are normalized by the statistics of the moment, so that old transitions
have the scale of new ones. Only transitions of training move the statistics. An evaluation and a
loaded policy use them as they are.

Shapes: ``T`` tasks, ``B`` rows of any tasks ``[B]`` or in groups of one task ``[R, n]``, ``D``
observation, ``N`` rows of one vector step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.checks import above, at_least, within
from mtrl_lightning.networks import TaskAxis
from mtrl_lightning.networks.network import task_values
from mtrl_lightning.networks.standardize import fill_unseen
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.state import PER_ENV
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch, Transitions
from mtrl_lightning.updates.transforms import RewardScale, Transform, check_discount


class RunningMoments:
    """Mean and variance of all rows of each task so far, in double precision on the CPU.

    With several processes they are those of the rows that all of them add.

    A task without rows has the mean 0 and the variance 1.

    Args:
        num_tasks: number of tasks, ``T``.
        shape: of a row.
    """

    def __init__(self, num_tasks: int, shape: tuple[int, ...]) -> None:
        self.count_T = torch.zeros(num_tasks, dtype=torch.float64)
        self.mean_TD = torch.zeros(num_tasks, *shape, dtype=torch.float64)
        self.variance_TD = torch.ones(num_tasks, *shape, dtype=torch.float64)

    def add(self, row_ND: npt.NDArray, task_N: npt.NDArray[np.int64]) -> None:
        """Add rows.

        Chan et al. 1979: the variance of a union is the weighted mean of the variances plus the
        variance of the means.
        """
        rows = torch.as_tensor(row_ND, dtype=torch.float64)
        tasks = torch.as_tensor(task_N)
        number_T = torch.bincount(tasks, minlength=len(self.count_T)).double()
        per_task = (-1, *[1] * (rows.ndim - 1))
        # where a task has no rows, its weight is 0 and its sums are
        divisor_T1 = number_T.clamp(min=1).view(per_task)
        added_mean_TD = torch.zeros_like(self.mean_TD).index_add_(0, tasks, rows) / divisor_T1
        square_ND = (rows - added_mean_TD[tasks]).square()
        added_variance_TD = torch.zeros_like(self.mean_TD).index_add_(0, tasks, square_ND)
        added_variance_TD /= divisor_T1
        added_mean_TD, added_variance_TD, number_T = distributed.merged_moments(
            added_mean_TD, added_variance_TD, number_T
        )
        self.count_T += number_T
        weight_T1 = (number_T / self.count_T.clamp(min=1)).view(per_task)
        shift_TD = added_mean_TD - self.mean_TD
        within_TD = weight_T1 * (added_variance_TD - self.variance_TD)
        between_TD = weight_T1 * (1 - weight_T1) * shift_TD.square()
        self.mean_TD += weight_T1 * shift_TD
        self.variance_TD += within_TD + between_TD

    def state_dict(self) -> dict[str, Tensor]:
        """Return the numbers of rows, the means and the variances."""
        moments = {"count": self.count_T, "mean": self.mean_TD, "variance": self.variance_TD}
        return {name: value.clone() for name, value in moments.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore them."""
        self.count_T = state["count"].cpu().clone()
        self.mean_TD = state["mean"].cpu().clone()
        self.variance_TD = state["variance"].cpu().clone()


class NormalizeObservation(Transform):
    """Normalize observations by the mean and standard deviation of the task's observations so far.

    Every observation of a training episode that an action responds to counts. Padding of an
    observation stays 0. A task that is not trained has the statistics of all trained tasks whose
    observations have its size.

    Args:
        spec: the tasks.
        clip: largest absolute value of the output, above 0; 10 in Stable-Baselines3.
        epsilon: added to the variances, above 0; 1e-8 in Stable-Baselines3.
        freeze_after: environment steps after which the statistics no longer change, at least 1;
            null to let them change as long as the run lasts. In a run that starts from a policy,
            those of the policy's tasks are frozen, and steps of the new tasks count.
    """

    mean_TD: Tensor
    std_TD: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        clip: float = 10.0,
        epsilon: float = 1e-8,
        freeze_after: int | None = None,
    ) -> None:
        super().__init__(spec)
        above(0, clip=clip, epsilon=epsilon)
        at_least(1, freeze_after=freeze_after, hint=", or null")
        self._clip = clip
        self._epsilon = epsilon
        self._freeze_after = freeze_after
        shape = spec.observation_space.shape
        self._sizes = [spec.shape_of("observation", task)[0] for task in range(spec.num_tasks)]
        self.moments = RunningMoments(spec.num_tasks, shape)
        """Statistics of all observations so far."""
        self._is_kept_T = torch.zeros(spec.num_tasks, dtype=torch.bool)
        """Tasks whose statistics are another run's, and frozen."""
        self.register_buffer("mean_TD", torch.zeros(spec.num_tasks, *shape), persistent=False)
        self.register_buffer("std_TD", torch.ones(spec.num_tasks, *shape), persistent=False)

    def observe(self, transitions: Transitions) -> None:
        """Add the observations that actions respond to."""
        if self.moments.count_T[~self._is_kept_T].sum() >= (self._freeze_after or math.inf):
            return
        observation_ED = transitions.observation_ED
        task_E = transitions.task_E
        if self._is_kept_T.any():
            is_new_E = ~self._is_kept_T.numpy()[task_E]
            observation_ED = observation_ED[is_new_E]
            task_E = task_E[is_new_E]
        self.moments.add(observation_ED, task_E)
        self._use_moments()

    def keep_tasks(self, tasks: Sequence[int]) -> None:
        """Freeze the statistics of tasks that come from another run, if statistics are frozen."""
        if self._freeze_after is None or len(tasks) == len(self._sizes):
            return
        self._is_kept_T[list(tasks)] = self.moments.count_T[list(tasks)] > 0

    def observation(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the normalized observations.

        Args:
            observation_BD: observations ``[B, D]``, or groups of rows ``[R, n, D]``.
            task_B: the task of each row, integers ``[B]``, or ``[R, n]`` with one task per group.

        Returns:
            Normalized observations of the same shape, in single precision.
        """
        mean_BD = task_values(self.mean_TD, task_B)
        std_BD = task_values(self.std_TD, task_B)
        normalized_BD = (observation_BD.float() - mean_BD) / std_BD
        return normalized_BD.clamp(-self._clip, self._clip)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the statistics, and which are kept."""
        return {**self.moments.state_dict(), "is_kept": self._is_kept_T.clone()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self.moments.load_state_dict(state)
        self._is_kept_T = state["is_kept"].cpu().clone()
        self._use_moments()

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the statistics."""
        names = [f"_extra_state.{name}" for name in self.moments.state_dict()]
        return dict.fromkeys(names, TaskAxis(has_mean=False))

    def _use_moments(self) -> None:
        """Bring means and standard deviations to the device, in single precision."""
        mean_TD = self.moments.mean_TD
        variance_TD = self.moments.variance_TD
        is_seen_T = self.moments.count_T > 0
        if not is_seen_T.all():
            mean_TD = mean_TD.clone()
            variance_TD = variance_TD.clone()
            fill_unseen(mean_TD, variance_TD, is_seen_T.tolist(), self._sizes)
        std_TD = (variance_TD + self._epsilon).sqrt()
        # without a wait: CUDA has read pageable memory on return
        self.mean_TD.copy_(mean_TD.float(), non_blocking=True)
        self.std_TD.copy_(std_TD.float(), non_blocking=True)


class NormalizeReward(RewardScale):
    """Divide rewards by the standard deviation of the task's discounted returns so far.

    The return of a step is ``G_t = discount G_(t-1) + r_t``, from the start of its episode, as
    in ``VecNormalize`` (Engstrom et al. 2020, arXiv 2005.12729). Rewards keep their sign: no mean
    is subtracted.

    Args:
        spec: the tasks.
        discount: gamma of the returns, that of the critic.
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
        self.moments = RunningMoments(spec.num_tasks, ())
        """Statistics of all returns so far."""
        self._return_E = np.zeros(0)
        """Return so far of each environment's episode under way."""
        self.register_buffer("factor_T", torch.ones(spec.num_tasks), persistent=False)

    def check(self, discount: float) -> None:
        """Refuse another discount than the critic's."""
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

    def factors(self, **quantities: Tensor) -> Tensor:
        """Return one divided by the standard deviations."""
        return self.factor_T

    def forward(self, batch: TransitionBatch, **quantities: Tensor) -> TransitionBatch:
        """Return the batch with normalized rewards."""
        batch = super().forward(batch, **quantities)
        return batch._replace(reward_Rn=batch.reward_Rn.clamp(-self._clip, self._clip))

    def get_extra_state(self) -> dict[str, Any]:
        """Return the statistics, and the returns of the episodes under way."""
        return {**self.moments.state_dict(), PER_ENV: {"returns": self._return_E.tolist()}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self.moments.load_state_dict(state)
        # None where there has been no step
        self._return_E = np.array([value or 0.0 for value in state[PER_ENV]["returns"]])
        self._use_moments()

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the statistics."""
        names = [f"_extra_state.{name}" for name in self.moments.state_dict()]
        return dict.fromkeys(names, TaskAxis(has_mean=False))

    def _use_moments(self) -> None:
        factor_T = (self.moments.variance_TD + self._epsilon).rsqrt()
        self.factor_T.copy_(factor_T.float(), non_blocking=True)
