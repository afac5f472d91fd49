"""Standardized observations: an encoder with running statistics.

Shapes: ``B`` rows of any tasks ``[B]`` or of a learning batch ``[R, n]``, ``N`` rows of a task,
``T`` tasks, ``D`` observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mtrl_lightning.checks import above, at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.encoder import Identity
from mtrl_lightning.networks.network import task_values
from mtrl_lightning.networks.task_axes import TaskAxis
from mtrl_lightning.ranks import distributed
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.utils.moments import union

ROUNDS = 8
"""How often a batch is clipped, each time by the statistics with it as clipped before. Where 0.1 %
of its rows are far from the others, each time removes nine tenths of the variance that they add.
"""


class Standardize(Identity):
    """Standardize a state vector by the mean and standard deviation of the first batches.

    Positions in MetaWorld differ by centimetres from episode to episode, a difference that is small
    for a network. The statistics are frozen after ``num_updates``, because networks trained with
    some statistics give wrong values with others.

    Where fewer than one in ``1 + clip^2`` observations lie far from the others (1 % with 10), they
    count in the statistics as if they lay ``clip`` standard deviations from the mean. An object
    that falls from MetaWorld's table does so for the rest of the episode, up to 190 m in 500 steps.
    Unclipped, such observations made the standard deviation of an object's height ten times as
    large in a run of MT50, and centimetres were lost.

    With statistics per task, a task that is not trained has those of all trained tasks whose
    observations have its size; its observations stay as they are if there is none.

    Args:
        spec: the tasks; observations are vectors.
        num_updates: number of first updates whose batches are used, at least 1.
        min_std: lower bound of the standard deviations, above 0.
        clip: largest absolute value of the output, in standard deviations, above 1. The
            statistics clip by it, too: below 5 it makes the deviations of ordinary observations
            smaller.
        per_task: whether each task has statistics of its own; None for a task's own where
            observations are of different sizes, and one set for all tasks otherwise.
    """

    mean_D: Tensor
    variance_D: Tensor
    mean_TD: Tensor
    variance_TD: Tensor
    rows_T: Tensor
    """Rows of each task in its statistics; negative where they are another run's, and frozen."""
    count: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        *,
        num_updates: int = 100,
        min_std: float = 0.02,
        clip: float = 10.0,
        per_task: bool | None = None,
    ) -> None:
        super().__init__(spec)
        at_least(1, num_updates=num_updates)
        above(0, min_std=min_std)
        above(1, clip=clip)
        self._num_updates = num_updates
        self._min_std = min_std
        self._clip = clip
        self._sizes = list(spec.observation_sizes) or [self.out_dim] * spec.num_tasks
        differ = len(set(self._sizes)) > 1
        if differ and per_task is False:
            raise ConfigurationError(
                "Standardize has per_task false, and the tasks' observations have the sizes"
                f" {', '.join(map(str, self._sizes))}: the same place has another meaning in each;"
                " set model.init_args.encoder.init_args.per_task to null"
            )
        self._per_task = differ if per_task is None else per_task
        if self._per_task:
            self.register_buffer("mean_TD", torch.zeros(spec.num_tasks, self.out_dim))
            self.register_buffer("variance_TD", torch.ones(spec.num_tasks, self.out_dim))
            self.register_buffer("rows_T", torch.zeros(spec.num_tasks, dtype=torch.int64))
        else:
            self.register_buffer("mean_D", torch.zeros(self.out_dim))
            self.register_buffer("variance_D", torch.ones(self.out_dim))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self._train_tasks = list(spec.train_tasks)
        # the same numbers on the host, which would have to wait for a GPU's
        self._seen = 0
        self._task_rows = [0] * spec.num_tasks
        self.register_load_state_dict_post_hook(Standardize._read_numbers)

    def observe(self, observation_BD: Tensor, task_B: Tensor) -> bool:
        """Update the statistics; shared ones require batches with the same number of rows."""
        if self._seen >= self._num_updates:
            return False
        observation_BD, task_B = _of_all_ranks(observation_BD, task_B)
        if self._per_task:
            self._observe_tasks(observation_BD, task_B)
        else:
            if self._seen == 0:
                self.variance_D.zero_()
            rows_ND = observation_BD.flatten(0, -2)
            self._add_rows(self.mean_D, self.variance_D, rows_ND, 1 / (self._seen + 1))
        self.count += 1
        self._seen += 1
        return True

    def forward(self, observation_BD: Tensor, task_B: Tensor) -> Tensor:
        """Return the standardized observations; padding stays 0.

        Args:
            observation_BD: observations ``[B, D]``, or groups of rows ``[R, n, D]``.
            task_B: the task of each row, integers ``[B]``, or ``[R, n]`` with one task per group.

        Returns:
            Standardized observations of the same shape.
        """
        if self._per_task:
            mean = task_values(self.mean_TD, task_B)
            variance = task_values(self.variance_TD, task_B)
        else:
            mean = self.mean_D
            variance = self.variance_D
        return ((observation_BD - mean) / self._std(variance)).clamp(-self._clip, self._clip)

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the statistics if each task has its own."""
        names = ("mean_TD", "variance_TD", "rows_T") if self._per_task else ()
        return dict.fromkeys(names, TaskAxis(has_mean=False))

    def keep_tasks(self, tasks: Sequence[int]) -> None:
        """Freeze the statistics of tasks that come from another run; the others are yet to be seen.

        Shared statistics stay as they came.
        """
        if not self._per_task or len(tasks) == len(self._sizes):
            return
        kept = list(tasks)
        self.rows_T[kept] = -self.rows_T[kept].abs()
        self.count.zero_()
        self._read_numbers()
        self._fill_unseen()

    def _observe_tasks(self, observation_BD: Tensor, task_B: Tensor) -> None:
        for task, rows_ND in enumerate(self._rows_by_task(observation_BD, task_B)):
            num_rows = len(rows_ND)
            if num_rows == 0 or self._task_rows[task] < 0:
                continue
            if self._task_rows[task] == 0:  # its entries are not from rows of the task
                self.mean_TD[task] = 0
                self.variance_TD[task] = 0
            self.rows_T[task] += num_rows
            self._task_rows[task] += num_rows
            weight = num_rows / self._task_rows[task]
            self._add_rows(self.mean_TD[task], self.variance_TD[task], rows_ND, weight)
        self._fill_unseen()

    def _add_rows(self, mean_D: Tensor, variance_D: Tensor, rows_ND: Tensor, weight: float) -> None:
        """Change mean and variance, in place, to those of a union with rows of this weight in it.

        The rows are clipped by the union's statistics. With clipped rows its deviation is smaller,
        so they are clipped again, ``ROUNDS`` times.
        """

        def with_rows(added_ND: Tensor) -> tuple[Tensor, Tensor]:
            moments = added_ND.mean(0), added_ND.var(0, correction=0)
            return union(mean_D, variance_D, *moments, weight)

        union_mean_D, union_variance_D = with_rows(rows_ND)
        for _ in range(ROUNDS):
            reach_D = self._clip * self._std(union_variance_D)
            clipped_ND = rows_ND.clamp(union_mean_D - reach_D, union_mean_D + reach_D)
            union_mean_D, union_variance_D = with_rows(clipped_ND)
        mean_D.copy_(union_mean_D)
        variance_D.copy_(union_variance_D)

    def _std(self, variance: Tensor) -> Tensor:
        return variance.sqrt().clamp(min=self._min_std)

    def _rows_by_task(self, observation_BD: Tensor, task_B: Tensor) -> list[Tensor]:
        """Return the observations ``[N, D]`` of each task."""
        if task_B.ndim == 1 or len(task_B) != len(self._train_tasks):
            return [observation_BD[task_B == task] for task in range(len(self._sizes))]
        none_0D = observation_BD[:0].flatten(0, 1)
        of_trained = dict(zip(self._train_tasks, observation_BD.unbind(), strict=True))
        return [of_trained.get(task, none_0D) for task in range(len(self._sizes))]

    def _fill_unseen(self) -> None:
        """Give tasks without statistics the pooled ones of tasks with observations alike."""
        for task, size in enumerate(self._sizes):
            seen = [i for i, rows in enumerate(self._task_rows) if rows and self._sizes[i] == size]
            if seen and task not in seen:
                mean_ND = self.mean_TD[seen]
                self.mean_TD[task] = mean_ND.mean(0)
                between_D = mean_ND.var(0, correction=0)
                self.variance_TD[task] = self.variance_TD[seen].mean(0) + between_D

    def _read_numbers(self, _: Any = None) -> None:
        """Read the numbers of updates and rows that were loaded or changed."""
        self._seen = int(self.count)
        if self._per_task:
            self._task_rows = self.rows_T.tolist()


def _of_all_ranks(observation_BD: Tensor, task_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of all ranks, rank after rank: with all of a task the ranks clip alike."""
    if distributed.world_size() == 1:
        return observation_BD, task_B
    if task_B.ndim == 1:
        rows = distributed.gather_rows(torch.cat([observation_BD, task_B[:, None]], 1))
        return rows[:, :-1], rows[:, -1].long()
    observation_RnD = torch.cat([*distributed.gather_tensor(observation_BD)], 1)
    return observation_RnD, task_B.repeat(1, distributed.world_size())
