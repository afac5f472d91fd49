"""Coefficients of loss terms.

A ``Temperature`` is the coefficient of the entropy. A ``TaskWeighting`` has one for each task's
loss.

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
        initial: initial value, above 0.
        per_task: whether each task has its own temperature ("disentangled alphas" in mtrl).
    """

    is_learned = True
    """Whether the temperature adapts to the policy's entropy."""
    log_alpha: Tensor

    def __init__(self, spec: EnvSpec, *, initial: float = 1.0, per_task: bool = True) -> None:
        super().__init__()
        above(0, initial=initial, prefix="the temperature's ")
        self._num_tasks = spec.num_tasks
        self.per_task = per_task
        num_temperatures = spec.num_tasks if per_task else 1
        self.log_alpha = nn.Parameter(torch.full((num_temperatures,), math.log(initial)))

    def forward(self, tasks: Tensor) -> Tensor:
        """Return ``log alpha`` of task indices, in their shape."""
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
        # not saved: a resumed run uses the value of its configuration
        self.register_buffer("log_alpha", log_alpha, persistent=False)


class TaskWeighting(nn.Module):
    """Weights of the tasks' losses; built by a factory ``(spec) -> TaskWeighting``.

    The weights sum to ``R``, so that the mean of weighted losses is a weighted mean. FAMO and
    Nash-MTL do not depend on the scale of losses: positive weights have no effect on them.

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
    """Weight all tasks equally.

    Args:
        spec: the tasks.
    """

    def forward(self, log_alpha_R: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(log_alpha_R)


class TemperatureWeights(TaskWeighting):
    """Weight tasks with low temperature more: ``R softmax(-log alpha)`` (Yang et al. 2020).

    A task whose policy has become nearly deterministic is learned, and the other tasks should not
    interfere with it. Requires one temperature per task.

    Args:
        spec: the tasks.
    """

    def check(self, temperature: Temperature | None) -> None:
        """Check that there is one learned temperature per task."""
        if temperature is None or not (temperature.is_learned and temperature.per_task):
            raise ConfigurationError(
                "task_weighting TemperatureWeights needs one learned temperature per task: set"
                " task_weighting to EqualWeights or ManualWeights, or choose an algorithm and a"
                " temperature that has them (temperature.init_args.per_task)"
            )

    def forward(self, log_alpha_R: Tensor) -> Tensor:
        """Return ``R softmax(-log alpha)``."""
        return len(log_alpha_R) * torch.softmax(-log_alpha_R.detach(), 0)


class ManualWeights(TaskWeighting):
    """Use the specified weights, 1 for all other tasks; only their proportions matter.

    Args:
        spec: the tasks.
        weights: weight of each task by name, at least 0.
    """

    weight_R: Tensor

    def __init__(self, spec: EnvSpec, weights: dict[str, float]) -> None:
        super().__init__(spec)
        trained = [spec.task_names[i] for i in spec.train_tasks]
        names = known_tasks(list(weights), spec.task_names)
        weights = dict(zip(names, weights.values(), strict=True))
        if excluded := [name for name in weights if name not in trained]:
            raise ConfigurationError(
                f"task weights: {', '.join(excluded)} is excluded from training; remove its weight"
            )
        weight_R = torch.tensor([float(weights.get(name, 1.0)) for name in trained])
        if not (weight_R.isfinite().all() and (weight_R >= 0).all() and weight_R.sum() > 0):
            raise ConfigurationError(
                f"task weights {weights}: give nonnegative numbers, at least one of them above 0"
            )
        self.register_buffer("weight_R", weight_R * len(trained) / weight_R.sum(), persistent=False)

    def forward(self, log_alpha_R: Tensor) -> Tensor:
        """Return the weights, normalized to the sum ``R``."""
        return self.weight_R
