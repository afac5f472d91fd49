"""Evaluation of ours and the peers by the same test episodes, between windows of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.envs.benchmarks.benchmark import Benchmark
from mtrl_lightning.policy import Mode, Policy
from mtrl_lightning.rollout import Evaluator

COPIES = 5
"""Environments of each task that are stepped together; they change no episode."""


class Examiner:
    """Evaluate a policy by the package's test episodes: the best actions, success in any step.

    Environments are stepped in this process, so that no worker is left beside the training.

    Args:
        benchmark: the tasks.
        num_episodes: test episodes per task.
    """

    def __init__(self, benchmark: Benchmark, num_episodes: int) -> None:
        self._names = benchmark.spec.task_names
        self._evaluator = Evaluator(
            benchmark, num_episodes=num_episodes, envs_per_task=COPIES, num_workers=0
        )

    def examine(self, policy: Policy, env_steps: int, updates: int) -> dict[str, Any]:
        """Return the success of each task, beside the steps and updates made so far."""
        success_T = self._evaluator.evaluate(policy).success_T
        return {
            "env_steps": env_steps,
            "updates": updates,
            "success": dict(zip(self._names, success_T.tolist(), strict=True)),
        }


class OneHotPolicy:
    """A policy of a peer, which takes observations with the task's one-hot.

    Args:
        num_tasks: of the one-hot.
        act_best: returns actions ``[E, A]`` without noise for such observations and the tasks.
    """

    def __init__(
        self,
        num_tasks: int,
        act_best: Callable[[npt.NDArray, npt.NDArray[np.int64]], npt.NDArray],
    ) -> None:
        self._one_hot_TT = np.eye(num_tasks)
        self._act_best = act_best

    def act(
        self, observation_ED: npt.NDArray, task_E: npt.NDArray[np.int64], mode: Mode
    ) -> npt.NDArray:
        """Choose the best actions ``[E, A]``, whatever the mode."""
        x_ED = np.concatenate([observation_ED, self._one_hot_TT[task_E]], axis=1)
        return self._act_best(x_ED, task_E)
