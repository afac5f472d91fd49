"""Coefficients of the terms of a loss.

A ``Temperature`` is that of the entropy. ``TaskWeighting`` has one for each task's loss, such as a
number given by hand.

Shapes: ``T`` tasks, ``R`` trained tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mtrl_lightning.checks import above
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks import TaskAxis
from mtrl_lightning.networks.network import task_values
from mtrl_lightning.spec import EnvSpec, known_tasks


class Temperature(nn.Module):
    """Learn the weight ``alpha`` of the entropy; built by a factory ``(spec) -> Temperature``.

    Args:
        spec: the tasks.
        initial: value at the start, above 0.
        per_task: one temperature per task ("disentangled alphas" in mtrl) or one for all.
    """

    is_learned = True
    """Whether the value changes with the policy's entropy."""
    log_alpha: Tensor

    def __init__(self, spec: EnvSpec, *, initial: float = 1.0, per_task: bool = True) -> None:
        super().__init__()
        above(0, initial=initial, prefix="the temperature's ")
        self._num_tasks = spec.num_tasks
        self.per_task = per_task
        num_temperatures = spec.num_tasks if per_task else 1
        self.log_alpha = nn.Parameter(torch.full((num_temperatures,), math.log(initial)))

    def forward(self, tasks: Tensor) -> Tensor:
        """Return ``log alpha`` of tasks, in their shape."""
        return task_values(self.log_alpha.expand(self._num_tasks), tasks)

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of the temperatures if each task has its own."""
        return {"log_alpha": TaskAxis()} if self.per_task else {}

    def values(self) -> Tensor:
        """Return ``alpha`` of every task, ``[T]``."""
        return self.log_alpha.detach().exp().expand(self._num_tasks)


class FixedTemperature(Temperature):
    """Keep the weight ``alpha`` of the entropy at one value, for all tasks.

    Args:
        spec: the tasks.
        value: the weight, above 0.
    """

    is_learned = False

    def __init__(self, spec: EnvSpec, *, value: float = 0.1) -> None:
        above(0, value=value, prefix="the fixed temperature's ")
        super().__init__(spec, initial=value, per_task=False)
        log_alpha = self.log_alpha.detach()
        del self.log_alpha
        # not saved: a continued run has the value of its configuration
        self.register_buffer("log_alpha", log_alpha, persistent=False)


class TaskWeighting(nn.Module):
    """Weights of the tasks' losses; built by a factory ``(spec) -> TaskWeighting``.

    The weights sum to ``R``, so that the mean of weighted losses is a weighted mean. FAMO and
    Nash-MTL do not depend on the scale of losses: with them, weights above 0 are without effect.

    Args:
        spec: the tasks.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()

    def check(self, temperature: Temperature | None) -> None:
        """Check that the weights can use the temperature; None for an algorithm without one."""

    def forward(self, log_alpha_R: Tensor) -> Tensor:
        """Return the trained tasks' weights ``[R]`` for log temperatures ``[R]``, detached."""
        raise NotImplementedError


class EqualWeights(TaskWeighting):
    """Every task counts alike.

    Args:
        spec: the tasks.
    """

    def forward(self, log_alpha_R: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(log_alpha_R)


class TemperatureWeights(TaskWeighting):
    """Weight tasks of low temperature more: ``R softmax(-log alpha)`` (Yang et al. 2020).

    A task whose policy has become sharp is learned, and the others should not disturb it. Needs one
    temperature per task.

    Args:
        spec: the tasks.
    """

    def check(self, temperature: Temperature | None) -> None:
        """Refuse one temperature for all: it would weight nothing."""
        if temperature is None:
            raise ConfigurationError(
                "task_weighting TemperatureWeights needs temperatures, and the algorithm has none:"
                " set task_weighting to EqualWeights or ManualWeights"
            )
        if not temperature.is_learned:
            raise ConfigurationError(
                "task_weighting TemperatureWeights needs temperatures that are learned, and this"
                " one is fixed: set task_weighting to EqualWeights or ManualWeights"
            )
        if not temperature.per_task:
            raise ConfigurationError(
                "task_weighting TemperatureWeights needs one temperature per task:"
                " set temperature.init_args.per_task to true"
            )

    def forward(self, log_alpha_R: Tensor) -> Tensor:
        """Return ``R softmax(-log alpha)``."""
        return len(log_alpha_R) * torch.softmax(-log_alpha_R.detach(), 0)


class ManualWeights(TaskWeighting):
    """Use given weights, 1 for tasks that are not named; only their proportions matter.

    Args:
        spec: the tasks.
        weights: task name to weight, 0 or above.
    """

    weight_R: Tensor

    def __init__(self, spec: EnvSpec, weights: dict[str, float]) -> None:
        super().__init__(spec)
        trained = [spec.task_names[i] for i in spec.train_tasks]
        names = known_tasks(list(weights), spec.task_names)
        weights = dict(zip(names, weights.values(), strict=True))
        if excluded := [name for name in weights if name not in trained]:
            raise ConfigurationError(
                f"{', '.join(excluded)}: excluded from training, and so without a weight; leave out"
            )
        weight_R = torch.tensor([float(weights.get(name, 1.0)) for name in trained])
        if not (weight_R.isfinite().all() and (weight_R >= 0).all() and weight_R.sum() > 0):
            raise ConfigurationError(
                f"task weights {weights}: give numbers of 0 and above, and at least one above 0"
            )
        self.register_buffer("weight_R", weight_R * len(trained) / weight_R.sum(), persistent=False)

    def forward(self, log_alpha_R: Tensor) -> Tensor:
        """Return the weights given, scaled to the sum ``R``."""
        return self.weight_R
