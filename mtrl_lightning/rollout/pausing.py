"""Pausing of solved tasks, so that the others get more of the run's steps.

Shapes: ``T`` tasks, ``E`` environments.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checks import at_least, within
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.rollout.episodes import EpisodeWindows, check_scores
from mtrl_lightning.rollout.extras import Extra
from mtrl_lightning.spec import EnvSpec


class PauseSolved(Extra):
    """Pause environments of solved tasks, so that unsolved tasks get more of the run's steps.

    A task with a recent success rate below ``success`` steps all of its environments. Above it, the
    number decreases proportionally to the failure rate, down to the fraction ``minimum``. Because
    ``total_steps`` counts stepped environments, the other tasks get more steps. (DRATS, arXiv
    2605.14350, moves environments between tasks.)

    A paused environment keeps its episode and continues it when the task fails more often.
    On-policy, the weight of a task in the losses is proportional to its steps, which has no effect
    with gradient methods that rescale losses. Off-policy, updates are made per vector step, so that
    there are more updates per environment step. Environments are chosen at the start of on-policy
    iterations, or off-policy at intervals of the longest episode. Without a success signal, the
    score is used instead: the return divided by the largest possible one. Episodes that started
    midway (``StartMidway``) do not count.

    Args:
        success: success rate above which environments are paused, from 0 to below 1.
        minimum: fraction of a task's environments that are never paused, above 0 and at most 1; at
            least one is stepped.
        episodes: number of a task's recent episodes per process, started with a reset, from which
            its success rate is computed, at least 1; a task with fewer is not paused.
    """

    def __init__(self, success: float = 0.9, minimum: float = 0.2, episodes: int = 20) -> None:
        within(0, 1, below_high=True, success=success)
        within(0, 1, above_low=True, minimum=minimum)
        at_least(1, episodes=episodes)
        self._success = success
        self._minimum = minimum
        self._episodes = episodes

    def __str__(self) -> str:
        return (
            f"{type(self).__name__}, from success {self._success:g} on,"
            f" down to {self._minimum:g} of a task's environments"
        )

    def check(self, spec: EnvSpec, window: int, envs_per_task: int) -> None:
        """Check that it can be used with these tasks."""
        check_scores("PauseSolved", spec, window, self._episodes)
        if self.num_stepped(envs_per_task, 1.0) == envs_per_task:
            raise ConfigurationError(
                f"PauseSolved with minimum {self._minimum:g} has no effect on {envs_per_task}"
                " environments per task and process: raise data.envs_per_task, lower the minimum,"
                " or remove PauseSolved"
            )

    def paused(
        self, spec: EnvSpec, task_E: npt.NDArray[np.int64], windows: EpisodeWindows
    ) -> npt.NDArray[np.bool_]:
        """Return which environments to pause: the last ones of each task."""
        paused_E = np.zeros(len(task_E), np.bool_)
        for task in np.unique(task_E):
            env_N = np.flatnonzero(task_E == task)
            score = windows.recent_score(int(task), self._episodes, spec)
            if score is not None:
                paused_E[env_N[self.num_stepped(len(env_N), score) :]] = True
        return paused_E

    def num_stepped(self, num_envs: int, success: float) -> int:
        """Return the number of a task's environments to step."""
        fraction = (1 - success) / (1 - self._success)
        target = num_envs * min(max(fraction, self._minimum), 1.0)
        # 1e-9 compensates for the rounding of products such as 10 * 0.3
        return max(1, math.ceil(target - 1e-9))
