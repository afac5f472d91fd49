"""Temporally correlated noise behind the actions that explore.

Shapes: ``T`` tasks, ``E`` environments, ``A`` action.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import within
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks.share import Rules, Share
from mtrl_lightning.rollout.episodes import task_means
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.types import Episode, Policy


class CorrelatedNoise:
    """First-order autoregressive noise: ``n_t = rho n_(t-1) + sqrt(1 - rho^2) e_t``.

    White noise moves an arm back and forth, and hardly ever holds a gripper closed. Noise with a
    correlation ``rho`` near 1 pushes in one direction for about ``1 / (1 - rho)`` steps. The noise
    of each single step stays standard normal, so that the policy's standard deviation and its log
    probabilities keep their meaning ("Colored Noise in PPO", Hollenstein et al. 2023, arXiv
    2312.11091). In continuous time this is an Ornstein-Uhlenbeck process. Every action dimension
    has its own noise, and an episode starts with a new one.

    A ``Collector`` calls ``begin`` once, then ``noise`` before each step that explores, and
    ``start_episodes`` where episodes have ended.

    Args:
        correlation: ``rho`` of two successive steps, from 0, which is white noise, to below 1.
    """

    def __init__(self, correlation: float = 0.9) -> None:
        within(0, 1, below_high=True, correlation=correlation)
        self._correlation = correlation
        self._generator = np.random.default_rng(0)

    def __str__(self) -> str:
        return f"{type(self).__name__}, correlation {self._correlation:g}"

    def check(self, spec: EnvSpec) -> None:
        """Check that it can be used with these tasks."""

    def begin(self, spec: EnvSpec, task_E: npt.NDArray[np.int64]) -> None:
        """Begin to explore in a number of environments.

        Raises:
            ConfigurationError: if it cannot be used with these tasks.
        """
        self.check(spec)
        self._task_E = task_E
        self._noise_EA = np.zeros((len(task_E), *spec.action_space.shape))
        self._is_first_E = np.ones(len(task_E), np.bool_)
        self._correlation_E = np.full(len(task_E), self._correlation)

    def seed(self, seed: int) -> None:
        """Seed the noise from here on."""
        self._generator = np.random.default_rng(seed)

    def noise(self) -> npt.NDArray[np.float32]:
        """Return the standard normal noise of the next step, ``[E, A]``."""
        innovation_EA = self._generator.standard_normal(self._noise_EA.shape)
        # n_0 = e_0, and n_t = rho n_(t-1) + sqrt(1 - rho^2) e_t
        rho_E1 = np.where(self._is_first_E, 0.0, self._correlation_E)[:, None]
        self._noise_EA = rho_E1 * self._noise_EA + np.sqrt(1 - rho_E1**2) * innovation_EA
        self._is_first_E[:] = False
        return self._noise_EA.astype(np.float32)

    def start_episodes(self, done_E: npt.NDArray[np.bool_], ended: Mapping[int, Episode]) -> None:
        """Reinitialize the noise where an episode has ended.

        Args:
            done_E: environments whose next step is the first of an episode.
            ended: episodes that have finished, by environment; rebuilt environments are in
                ``done_E`` only.
        """
        self._is_first_E |= done_E
        self._correlation_E[done_E] = self._correlation

    def correlations(self) -> dict[int, float]:
        """Return each task's mean correlation over these environments."""
        return task_means(self._correlation_E, self._task_E)

    def state_dict(self) -> dict[str, Any]:
        """Return the noise of the last step, the correlations and the generator's state."""
        return {
            "noise": self._noise_EA.tolist(),
            "is_first": self._is_first_E.tolist(),
            "correlation": self._correlation_E.tolist(),
            "generator": self._generator.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; a new process of a run has no generator's state."""
        self._noise_EA = np.array(state["noise"], np.float64)
        self._is_first_E = np.array(state["is_first"], np.bool_)
        self._correlation_E = np.array(state["correlation"], np.float64)
        if state["generator"] is not None:
            self._generator.bit_generator.state = state["generator"]

    @classmethod
    def reshard(cls, states: Sequence[Mapping[str, Any]], share: Share) -> dict[str, Any]:
        """Return the state of one process when a run continues with another number of them.

        Args:
            states: of all processes of the checkpoint.
            share: the rank, and the environments that it takes over.
        """
        return share.join("rollout.exploration", states, cls._rules(share))

    @classmethod
    def _rules(cls, share: Share) -> Rules:
        per_env = dict.fromkeys(("noise", "is_first", "correlation"), share.of_envs)
        return {**per_env, "generator": share.own}


class AdaptiveNoise(CorrelatedNoise):
    """Noise whose correlation falls as a task succeeds: ``rho = correlation (1 - success)``.

    A task without a success is explored with noise that persists; precision, which a solved task
    needs, wants white noise. The success is a moving average over each environment's episodes,
    those of the warm-up included, averaged over a task's environments in this process. In tasks
    without a success signal, the score takes its place: the return divided by the largest possible
    one.

    Args:
        correlation: ``rho`` while nothing succeeds, from 0 to below 1.
        step_size: weight of an environment's newest episode in the average, above 0 and at most 1.
    """

    def __init__(self, correlation: float = 0.9, step_size: float = 0.2) -> None:
        super().__init__(correlation)
        within(0, 1, above_low=True, step_size=step_size)
        self._step_size = step_size
        self._spec: EnvSpec | None = None

    def __str__(self) -> str:
        has_success = self._spec is None or self._spec.has_success
        return f"{super().__str__()} (1 - {'success' if has_success else 'score'})"

    def check(self, spec: EnvSpec) -> None:
        """Check that the tasks have a success signal or a score."""
        if not spec.has_score:
            raise ConfigurationError(
                "rollout.exploration is AdaptiveNoise, and the tasks have neither a success signal"
                " nor a largest return that it could adapt to: choose CorrelatedNoise"
            )

    def begin(self, spec: EnvSpec, task_E: npt.NDArray[np.int64]) -> None:
        """Begin to explore in a number of environments.

        Raises:
            ConfigurationError: if the tasks have neither a success signal nor a score.
        """
        super().begin(spec, task_E)
        self._spec = spec
        self._success_E = np.zeros(len(task_E))

    def start_episodes(self, done_E: npt.NDArray[np.bool_], ended: Mapping[int, Episode]) -> None:
        """Reinitialize where an episode has ended, with the correlation for the success so far."""
        super().start_episodes(done_E, ended)
        assert self._spec is not None, "begin() comes first"
        for env, episode in ended.items():
            score = self._spec.score(episode.return_, episode.success)
            error = score - self._success_E[env]
            self._success_E[env] += self._step_size * error
        for task in np.unique(self._task_E[done_E]):
            is_task_E = self._task_E == task
            success = self._success_E[is_task_E].mean()
            # within an episode it stays, so that each step's noise is standard normal
            self._correlation_E[is_task_E & done_E] = self._correlation * (1 - success)

    def state_dict(self) -> dict[str, Any]:
        """Return also the average success of each environment."""
        return {**super().state_dict(), "success": self._success_E.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        super().load_state_dict(state)
        self._success_E = np.array(state["success"], np.float64)

    @classmethod
    def _rules(cls, share: Share) -> Rules:
        return {**super()._rules(share), "success": share.of_envs}


def check_takes_noise(policy: Policy) -> None:
    """Check that a policy can explore with given noise."""
    if "noise_EA" not in inspect.signature(policy.act).parameters:
        raise ConfigurationError(
            f"rollout.exploration needs a policy whose act takes noise_EA, and that of"
            f" {type(policy).__name__} does not: give an algorithm, add it (see NoisyPolicy), or"
            " leave rollout.exploration out"
        )
