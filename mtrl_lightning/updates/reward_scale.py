"""Scales of the tasks' rewards.

Shapes: ``T`` tasks, ``R`` trained tasks, ``E`` environments of one vector step, ``S`` steps of an
episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mtrl_lightning.checkpoints import PER_ENV
from mtrl_lightning.checks import above, at_least, within
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import TaskAxis
from mtrl_lightning.ranks import distributed
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch, Transitions
from mtrl_lightning.updates.transforms import RewardScale
from mtrl_lightning.utils.devices import to_device
from mtrl_lightning.utils.moments import union


class MeanReward(RewardScale):
    """Adaptive reward scaling: a task's rewards are multiplied by ``max_j m_j / m_i``.

    ``m_i`` is task ``i``'s mean reward in the replay: ARS (Cho et al., ICML 2025, equation 6). The
    paper's rewards are not negative; here ``m_i`` is the magnitude of the mean. The factors change
    only when the networks are reset.

    Args:
        spec: the tasks.
        max_factor: upper bound of the factors, at least 1, for tasks with very sparse rewards.
    """

    factor_T: Tensor

    def __init__(self, spec: EnvSpec, max_factor: float = 1000.0) -> None:
        super().__init__(spec)
        at_least(1, max_factor=max_factor)
        self._max_factor = max_factor
        self.register_buffer("factor_T", torch.ones(spec.num_tasks))

    def begin_learning(self, mean_reward_R: npt.NDArray[np.float64]) -> None:
        """Recompute the factors."""
        # the mean is NaN for a task without transitions; sampling from it raises an error
        mean_R = np.nan_to_num(np.abs(mean_reward_R))
        largest = mean_R.max() or 1.0
        smallest_R = np.maximum(mean_R, largest / self._max_factor)
        factor_R = np.where(mean_R.max() > 0, largest / smallest_R, 1.0)
        self.factor_T[self._train_tasks] = torch.as_tensor(factor_R).to(self.factor_T)

    def factors(self) -> Tensor:
        """Return the current factors."""
        return self.factor_T

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the factors."""
        return {"factor_T": TaskAxis(has_mean=False)}


class ReturnRange(RewardScale):
    """Divide by the largest magnitude of a task's discounted returns, to keep values in ``bound``.

    BRC (Nauman et al. 2025, arXiv 2505.23150): ``r bound / (max |G| - alpha H target_entropy / 2)``
    with the effective horizon ``H = 1 / (1 - discount)``. ``G`` are the discounted returns from
    each step of each finished episode to its end; a truncated episode is extrapolated with ``H``
    times its mean reward. Until a task's first episode has finished, its rewards are scaled only by
    the temperature term. Rewards are not scaled if the divisor is not positive.

    Args:
        spec: the tasks.
        discount: gamma of the returns; must equal the critic's.
        bound: target bound of the values' magnitude, above 0; 10 in BRC.
    """

    largest_T: Tensor

    def __init__(self, spec: EnvSpec, discount: float = 0.99, bound: float = 10.0) -> None:
        super().__init__(spec)
        within(0, 1, below_high=True, discount=discount)
        above(0, bound=bound)
        self._discount = discount
        self._bound = bound
        self._horizon = 1 / (1 - discount)
        self._length_E = np.zeros(0, np.int64)
        """Number of steps of each environment's current episode."""
        self._reward_ES = np.zeros((0, 0))
        """Rewards of these steps; later entries are unused."""
        self.register_buffer("largest_T", torch.zeros(spec.num_tasks))

    def check(self, discount: float) -> None:
        """Check that the discount equals the critic's."""
        check_discount(self._discount, discount)

    def observe(self, transitions: Transitions) -> None:
        """Append the rewards to their episodes; compute the returns of finished episodes."""
        env_E = transitions.env_E
        self._reserve(int(env_E.max(initial=-1)) + 1)
        self._reward_ES[env_E, self._length_E[env_E]] = transitions.reward_E
        self._length_E[env_E] += 1
        done_E = transitions.terminated_E | transitions.truncated_E
        if not done_E.any():
            return
        largest_T = [0.0] * len(self.largest_T)
        for row in np.flatnonzero(done_E).tolist():
            env, task = int(env_E[row]), int(transitions.task_E[row])
            rewards = self._reward_ES[env, : self._length_E[env]]
            is_terminated = bool(transitions.terminated_E[row])
            return_after = 0.0 if is_terminated else float(rewards.mean()) * self._horizon
            largest = largest_return(rewards.tolist(), return_after, self._discount)
            largest_T[task] = max(largest_T[task], largest)
        self._length_E[env_E[done_E]] = 0
        ended_T = torch.tensor(largest_T, dtype=self.largest_T.dtype)
        torch.maximum(self.largest_T, to_device(ended_T, self.largest_T.device), out=self.largest_T)

    def drop_episodes(self, env_N: npt.NDArray[np.int64]) -> None:
        """Drop the rewards of these environments' episodes."""
        self._length_E[env_N[env_N < len(self._length_E)]] = 0

    def _reserve(self, num_envs: int) -> None:
        """Allocate memory for these environments, and for one more step of each."""
        num_steps = int(self._length_E.max(initial=0)) + 1
        more_envs = max(num_envs - len(self._length_E), 0)
        more_steps = num_steps if num_steps > self._reward_ES.shape[1] else 0
        if more_envs or more_steps:
            self._length_E = np.pad(self._length_E, (0, more_envs))
            self._reward_ES = np.pad(self._reward_ES, ((0, more_envs), (0, more_steps)))

    def sync_ranks(self) -> None:
        """Synchronize the largest returns over all ranks."""
        self.largest_T.copy_(distributed.largest(self.largest_T))

    def factors(self) -> Tensor:
        """Return ``bound`` divided by each task's range."""
        temperature_T = self.quantities["temperature_T"]()
        target_entropy_T = self.quantities["target_entropy_T"]()
        range_T = self.largest_T - temperature_T * self._horizon * target_entropy_T / 2
        return torch.where(range_T > 0, self._bound / range_T, 1.0)

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the largest returns."""
        return {"largest_T": TaskAxis(has_mean=False)}

    def get_extra_state(self) -> dict[str, Any]:
        """Return the rewards of the current episodes."""
        of_envs = zip(self._reward_ES, self._length_E, strict=True)
        return {PER_ENV: {"rewards": [reward_S[:n].tolist() for reward_S, n in of_envs]}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore them."""
        rewards = [of_env or [] for of_env in state[PER_ENV]["rewards"]]
        self._length_E = np.array([len(of_env) for of_env in rewards], np.int64)
        self._reward_ES = np.zeros((len(rewards), max(self._length_E, default=0)))
        for env, of_env in enumerate(rewards):
            self._reward_ES[env, : len(of_env)] = of_env


def check_discount(own: float, critic: float) -> None:
    """Check that the discount of a reward scale equals the critic's."""
    if own != critic:
        raise ConfigurationError(
            f"reward_scale has discount {own}, but the critic has {critic}:"
            " set model.init_args.reward_scale.init_args.discount to the critic's"
        )


def largest_return(rewards: list[float], return_after: float, discount: float) -> float:
    """Return the largest ``|G_t|``, ``G_t = r_t + discount G_(t+1)``.

    Args:
        rewards: rewards of an episode's steps.
        return_after: ``G`` after the last step.
        discount: gamma.
    """
    return_ = return_after
    largest = 0.0
    for reward in reversed(rewards):
        return_ = reward + discount * return_
        largest = max(largest, abs(return_))
    return largest


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
