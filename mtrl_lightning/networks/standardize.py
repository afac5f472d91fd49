"""Standardized observations: an encoder with running statistics.

Shapes: ``B`` rows of any tasks ``[B]`` or of a training batch ``[R, n]``, ``N`` rows of a task,
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
from mtrl_lightning.networks.network import TaskAxis, task_values
from mtrl_lightning.ranks import distributed
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.utils.moments import union

ROUNDS = 8
"""Number of times a batch is clipped, each time with statistics that include the previously
clipped batch. If 0.1 % of its rows are outliers, each round removes 90 % of the variance they add.
"""


class Standardize(Identity):
    """Standardize a state vector with the mean and standard deviation of the first batches.

    Positions in MetaWorld differ by centimeters between episodes, which is a small difference for a
    network. The statistics are frozen after ``num_updates``, because networks are only valid with
    the statistics they were trained with.

    If fewer than one in ``1 + clip^2`` observations are outliers (1 % for a clip of 10), they enter
    the statistics as if they were ``clip`` standard deviations from the mean. An object that falls
    off MetaWorld's table keeps falling for the rest of the episode, up to 190 m in 500 steps.
    Without clipping, such observations increased the standard deviation of an object's height
    tenfold in a run on MT50, so that centimeters no longer mattered.

    With statistics per task, an untrained task uses those of all trained tasks with the same
    observation size; without such tasks, its observations are not standardized.

    Args:
        spec: the tasks; observations are vectors.
        num_updates: number of initial updates whose batches are used, at least 1.
        min_std: lower bound of the standard deviations, above 0.
        clip: largest absolute value of the output, in standard deviations, above 1. The statistics
            are clipped, too: values below 5 reduce the standard deviations of ordinary
            observations.
        per_task: whether each task has its own statistics; None for statistics per task if
            observation sizes differ, and shared statistics otherwise.
    """

    mean_D: Tensor
    variance_D: Tensor
    mean_TD: Tensor
    variance_TD: Tensor
    rows_T: Tensor
    """Rows of each task in its statistics; negative if they are frozen ones of another run."""
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
                "Standardize has per_task false, but the tasks' observations have different sizes"
                f" ({', '.join(map(str, self._sizes))}), so their entries cannot share statistics:"
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
        # host copies, so that reading them does not synchronize with the GPU
        self._seen = 0
        self._task_rows = [0] * spec.num_tasks
        self.register_load_state_dict_post_hook(Standardize._read_numbers)

    def observe(self, observation_BD: Tensor, task_B: Tensor) -> bool:
        """Update the statistics; shared ones require batches with the same number of rows."""
        if self._seen >= self._num_updates:
            return False
        observation_BD, task_B = _of_all_ranks(observation_BD.float(), task_B)
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
        """Freeze the statistics of tasks copied from another run, but learn those of the others.

        Shared statistics are not changed.
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
            if self._task_rows[task] == 0:  # its entries are not computed from the task's rows
                self.mean_TD[task] = 0
                self.variance_TD[task] = 0
            self.rows_T[task] += num_rows
            self._task_rows[task] += num_rows
            weight = num_rows / self._task_rows[task]
            self._add_rows(self.mean_TD[task], self.variance_TD[task], rows_ND, weight)
        self._fill_unseen()

    def _add_rows(self, mean_D: Tensor, variance_D: Tensor, rows_ND: Tensor, weight: float) -> None:
        """Update mean and variance in place to those of the union with rows of this total weight.

        The rows are clipped with the union's statistics. Clipping reduces its standard deviation,
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
        """Assign to tasks without statistics the pooled ones of tasks with equal sizes."""
        for task, size in enumerate(self._sizes):
            seen = [i for i, rows in enumerate(self._task_rows) if rows and self._sizes[i] == size]
            if seen and task not in seen:
                mean_ND = self.mean_TD[seen]
                self.mean_TD[task] = mean_ND.mean(0)
                between_D = mean_ND.var(0, correction=0)
                self.variance_TD[task] = self.variance_TD[seen].mean(0) + between_D

    def _read_numbers(self, _: Any = None) -> None:
        """Copy the numbers of updates and rows to the host."""
        self._seen = int(self.count)
        if self._per_task:
            self._task_rows = self.rows_T.tolist()


def _of_all_ranks(observation_BD: Tensor, task_B: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the rows of all ranks, in rank order, so that all ranks clip identically."""
    if distributed.world_size() == 1:
        return observation_BD, task_B
    if task_B.ndim == 1:
        rows = distributed.gather_rows(torch.cat([observation_BD, task_B[:, None]], 1))
        return rows[:, :-1], rows[:, -1].long()
    observation_RnD = torch.cat([*distributed.gather_tensor(observation_BD)], 1)
    return observation_RnD, task_B.repeat(1, distributed.world_size())
