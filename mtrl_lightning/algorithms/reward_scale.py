"""Rewards brought to one scale before they are learned from.

Shapes: ``T`` tasks, ``R`` trained tasks, ``B`` batch, ``N`` transitions of one vector step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.types import EnvSpec, Transitions


class RewardScale(nn.Module):
    """Scale each task's rewards when they are sampled; built by a factory ``(spec) -> RewardScale``.

    This one leaves them as they are. The replay keeps what was received, so that a change of scale
    holds for all of it.

    Args:
        spec: the tasks.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self._train_tasks = list(spec.train_tasks)

    def check(self, discount: float) -> None:
        """Check that the scale fits the critic's discount.

        Raises:
            ConfigurationError: if it does not.
        """

    def observe(self, transitions: Transitions) -> None:
        """Hear of one vector step's transitions."""

    def rescale(self, mean_reward_R: npt.NDArray[np.float64]) -> None:
        """Hear of the mean reward of each trained task in the replay: before the first update, and at each reset."""

    def forward(
        self, reward_B: Tensor, task_B: Tensor, alpha_T: Tensor, target_entropy: float
    ) -> Tensor:
        """Return the rewards ``[B]`` to learn from, for temperatures ``[T]``."""
        return reward_B


class MeanReward(RewardScale):
    """Adaptive reward scaling: factor ``max_j m_j / m_i``, where ``m_i`` is task ``i``'s mean reward in the replay.

    ARS (Cho et al., ICML 2025, equation 6). The paper's rewards are not negative; here ``m_i`` is
    the magnitude of the mean. Factors stay as they are between resets.

    Args:
        spec: the tasks.
        max_factor: largest factor, for a task that has hardly seen a reward.

    Raises:
        ConfigurationError: if ``max_factor`` is below 1.
    """

    factor_T: Tensor

    def __init__(self, spec: EnvSpec, max_factor: float = 1000.0) -> None:
        super().__init__(spec)
        if not max_factor >= 1:
            raise ConfigurationError(f"max_factor is {max_factor}: give at least 1")
        self._max_factor = max_factor
        self.register_buffer("factor_T", torch.ones(spec.num_tasks))

    def rescale(self, mean_reward_R: npt.NDArray[np.float64]) -> None:
        """Compute the factors anew."""
        mean_R = np.nan_to_num(
            np.abs(mean_reward_R)
        )  # a task without transitions is refused where it is sampled
        largest = mean_R.max() or 1.0
        factor_R = np.where(
            mean_R.max() > 0, largest / np.maximum(mean_R, largest / self._max_factor), 1.0
        )
        self.factor_T[self._train_tasks] = torch.as_tensor(factor_R).to(self.factor_T)

    def forward(
        self, reward_B: Tensor, task_B: Tensor, alpha_T: Tensor, target_entropy: float
    ) -> Tensor:
        """Multiply by the task's factor."""
        return reward_B * self.factor_T[task_B]


class ReturnRange(RewardScale):
    """Divide by the largest magnitude of a task's discounted returns, so that values lie within ``bound``.

    BRC (Nauman et al. 2025, arXiv 2505.23150): ``r bound / (max |G| - alpha H target_entropy / 2)``
    with the effective horizon ``H = 1 / (1 - discount)``. ``G`` are the discounted returns from
    every step of every finished episode to its end; a truncated one is continued with ``H`` times
    its mean reward. Until a task's first episode has ended its rewards are scaled by the
    temperature's term alone. Where the divisor is not above 0, they stay as they are.

    Args:
        spec: the tasks.
        discount: gamma of the returns; as of the critic.
        bound: magnitude that values shall keep to; 10 in BRC.

    Raises:
        ConfigurationError: if a number is out of its range.
    """

    largest_T: Tensor

    def __init__(self, spec: EnvSpec, discount: float = 0.99, bound: float = 10.0) -> None:
        super().__init__(spec)
        if not (0 <= discount < 1 and bound > 0):
            raise ConfigurationError(
                f"discount is {discount} and bound {bound}: give 0 <= discount < 1 and bound > 0"
            )
        self._discount, self._bound = discount, bound
        self._horizon = 1 / (1 - discount)
        self._rewards: dict[int, list[float]] = {}
        self.register_buffer("largest_T", torch.zeros(spec.num_tasks))

    def check(self, discount: float) -> None:
        """Refuse another discount than the critic's."""
        if discount != self._discount:
            raise ConfigurationError(
                f"reward_scale has the discount {self._discount} and the critic {discount}: set"
                " model.init_args.reward_scale.init_args.discount to the critic's"
            )

    def observe(self, transitions: Transitions) -> None:
        """Add the rewards to their episodes; take the returns of those that ended.

        An environment that is left out had a fault: its episode is dropped.
        """
        here = set(transitions.env_E.tolist())
        self._rewards = {env: rewards for env, rewards in self._rewards.items() if env in here}
        for env, reward in zip(
            transitions.env_E.tolist(), transitions.reward_E.tolist(), strict=True
        ):
            self._rewards.setdefault(env, []).append(reward)
        done_E = transitions.terminated_E | transitions.truncated_E
        for row in np.flatnonzero(done_E).tolist():
            rewards = np.array(self._rewards.pop(int(transitions.env_E[row])))
            following = 0.0 if transitions.terminated_E[row] else rewards.mean() * self._horizon
            returns = discounted_returns(rewards, following, self._discount)
            task = int(transitions.task_E[row])
            self.largest_T[task] = max(float(self.largest_T[task]), float(np.abs(returns).max()))

    def forward(
        self, reward_B: Tensor, task_B: Tensor, alpha_T: Tensor, target_entropy: float
    ) -> Tensor:
        """Divide by the task's range."""
        range_T = self.largest_T - alpha_T * self._horizon * target_entropy / 2
        return reward_B * torch.where(range_T > 0, self._bound / range_T, 1.0)[task_B]

    def get_extra_state(self) -> dict[str, Any]:
        """Return the rewards of the episodes under way."""
        return {"rewards": {str(env): list(rewards) for env, rewards in self._rewards.items()}}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore them."""
        self._rewards = {int(env): list(rewards) for env, rewards in state["rewards"].items()}


def discounted_returns(rewards: npt.NDArray, following: float, discount: float) -> npt.NDArray:
    """Return ``G_t = r_t + discount G_(t+1)`` of every step, with ``following`` after the last."""
    returns = np.empty(len(rewards))
    for t in reversed(range(len(rewards))):
        following = returns[t] = rewards[t] + discount * following
    return returns
