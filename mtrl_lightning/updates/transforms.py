"""Transforms of transitions before an algorithm learns from them.

``Transform`` is the base class, and ``Transforms`` an algorithm's list of them. A ``RewardScale``
normalizes the tasks' rewards to a common scale.

Shapes: ``T`` tasks, ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks or ``R, n``,
``D`` observation, ``E`` environments of one vector step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mtrl_lightning.checks import above, at_least, within
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import TaskAxis
from mtrl_lightning.ranks import distributed
from mtrl_lightning.ranks.state import PER_ENV
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.transitions import TransitionBatch, Transitions
from mtrl_lightning.updates.generators import Generators
from mtrl_lightning.utils.devices import to_device


class Transform(nn.Module):
    """Transform sampled batches, such as their rewards; built by a factory ``(spec) -> Transform``.

    The replay stores untransformed transitions, so updated statistics apply to all of them. Return
    state per environment from ``get_extra_state`` as lists under the key ``per_env``; see
    ``mtrl_lightning.ranks.state``.

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
