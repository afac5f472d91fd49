"""A trained policy from a checkpoint, usable without a trainer, a benchmark or a spec.

Shapes: ``E`` observations, ``D`` observation, ``A`` action.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from mtrl_lightning.algorithms import Algorithm
from mtrl_lightning.checks import one_of
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.runs import best_checkpoint
from mtrl_lightning.spec import EnvSpec, known_tasks, pad_to
from mtrl_lightning.transitions import Mode, step_unit
from mtrl_lightning.utils.counters import Counters

Task = str | int


class LoadedPolicy:
    """The policy of a trained algorithm.

    Args:
        algorithm: the trained algorithm, which is set to evaluation mode.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm.eval()

    @property
    def algorithm(self) -> Algorithm:
        """The trained algorithm."""
        return self._algorithm

    @property
    def spec(self) -> EnvSpec:
        """The tasks, and the spaces of their observations and actions."""
        return self._algorithm.spec

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of all tasks, in the order of their indices."""
        return self.spec.task_names

    @property
    def env_steps(self) -> int:
        """Environment steps of training before the checkpoint was written."""
        return self.counters.env_steps

    @property
    def counters(self) -> Counters:
        """Counters of its training, such as ``updates``."""
        return self._algorithm.counters

    @property
    def step_unit(self) -> str:
        """Unit of ``env_steps``; ``updates`` for offline algorithms."""
        return step_unit(self._algorithm.kind)

    @property
    def untrained_summary(self) -> str:
        """Description of the parameters used for untrained tasks; empty if there are none."""
        return self._algorithm.untrained.summary

    def act(
        self,
        observation: npt.ArrayLike,
        task: Task | Sequence[Task] | npt.NDArray[Any],
        mode: Mode = "exploit",
    ) -> npt.NDArray[np.float32]:
        """Choose actions.

        Args:
            observation: one observation ``[D]``, or a batch ``[E, D]``. If tasks have different
                sizes, ``D`` is the largest, and smaller observations are padded with zeros; with a
                single task for all rows, the task's own size is accepted as well.
            task: a name or index for all observations, or one per row.
            mode: ``exploit`` takes the distribution's mode, ``explore`` samples from the
                distribution, ``random`` samples uniformly.

        Returns:
            An action ``[A]`` between -1 and 1, or one per row, ``[E, A]``. If tasks have different
            sizes, ``A`` is the task's own size with a single task for all rows, and otherwise the
            largest, with smaller actions padded with zeros. A discrete action is a one-hot row,
            whose index is ``argmax(-1)``.
        """
        one_of(get_args(Mode), mode=mode)
        space = self.spec.observation_space
        try:
            observation_ED = np.asarray(observation, dtype=space.dtype)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the observation is not an array of numbers of shape {space.shape}: {error}"
            ) from error
        only_task = self._task_index(task) if _is_one(task) else None
        if only_task is not None:
            observation_ED = self._padded(observation_ED, only_task)
        is_one = observation_ED.shape == space.shape
        if is_one:
            observation_ED = observation_ED[None]
        if observation_ED.shape[1:] != space.shape:
            raise ConfigurationError(
                f"the observation has shape {np.shape(observation)}:"
                f" give one observation of shape {space.shape},"
                f" or a batch of shape {('E', *space.shape)}"
            )
        task_E = self._task_indices(task, len(observation_ED))
        chosen = self._algorithm.act(observation_ED, task_E, mode)
        action_EA = chosen[0] if isinstance(chosen, tuple) else chosen
        if only_task is not None:
            action_EA = pad_to(action_EA, self.spec.shape_of("action", only_task))
        return action_EA[0] if is_one else action_EA

    def seed_actions(self, seed: int) -> None:
        """Seed the random numbers of the modes ``explore`` and ``random``."""
        self._algorithm.seed_actions(seed)

    def get_weights(self) -> dict[str, Any]:
        """Return CPU copies of the weights that ``act`` uses."""
        return self._algorithm.get_weights()

    def set_weights(self, weights: Mapping[str, Any], weights_seq_no: int) -> None:
        """Load weights that ``get_weights`` of equal networks returned.

        Args:
            weights: states of the policy's networks by name.
            weights_seq_no: number of updates after which they were taken.
        """
        self._algorithm.set_weights(weights, weights_seq_no)

    def _padded(self, observation: npt.NDArray, task: int) -> npt.NDArray:
        """Pad observations of the task's own size with zeros; return others unchanged."""
        own_shape = self.spec.shape_of("observation", task)
        is_own = observation.shape[-len(own_shape) :] == own_shape
        return pad_to(observation, self.spec.observation_space.shape) if is_own else observation

    def _task_indices(self, task: Any, num_observations: int) -> npt.NDArray[np.int64]:
        tasks = [task] if _is_one(task) else list(task)
        indices = [self._task_index(one) for one in tasks]
        if len(indices) not in (1, num_observations):
            raise ConfigurationError(
                f"got {len(indices)} tasks for {num_observations} observations:"
                " give one for all, or one per observation"
            )
        return np.broadcast_to(np.array(indices, np.int64), num_observations).copy()

    def _task_index(self, task: Any) -> int:
        if isinstance(task, str):
            (name,) = known_tasks([task], self.task_names)
            return self.task_names.index(name)
        with contextlib.suppress(TypeError):  # it is not an integer
            index = operator.index(task)
            if 0 <= index < len(self.task_names):
                return index
        raise ConfigurationError(
            f"unknown task {task!r}: give a name,"
            f" or a number from 0 to {len(self.task_names) - 1}, of {', '.join(self.task_names)}"
        )


def _is_one(task: Any) -> bool:
    return isinstance(task, str) or np.ndim(task) == 0


def load_policy(
    checkpoint: str | Path,
    *,
    trust: Sequence[str] = (),
    map_location: str | torch.device = "cpu",
    **overrides: Any,
) -> LoadedPolicy:
    """Load the policy of a checkpoint without executing code in the file.

    Args:
        checkpoint: a file in a run's ``checkpoints/`` folder; a run folder, for its best
            checkpoint, or the last one if there is no best; or the name of a policy of this
            package, such as ``mt10``.
        trust: modules and packages, such as ``["mytasks"]``, whose classes the checkpoint may use
            in addition to those of this package, ``torch.nn`` and ``torch.optim``.
        map_location: device of the policy.
        overrides: arguments of the algorithm that replace the saved ones; required for values
            that cannot be saved, such as a lambda: ``actor=my_function``.
    """
    path = best_checkpoint(checkpoint)
    return LoadedPolicy(
        Algorithm.load_from_checkpoint(path, map_location, trust=trust, **overrides)
    )
