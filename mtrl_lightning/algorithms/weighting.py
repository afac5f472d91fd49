"""How much each task's loss counts.

Shapes: ``T`` trained tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtrl_lightning.algorithms.temperature import Temperature
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.types import EnvSpec, known_tasks


class TaskWeighting(nn.Module):
    """Weights of the tasks' losses; built by a factory ``(spec) -> TaskWeighting``.

    The weights sum to ``T``, so that the mean of weighted losses is a weighted mean. FAMO and
    Nash-MTL do not depend on the scale of losses: with them, weights above 0 are without effect.

    Args:
        spec: the tasks.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self._num_trained = len(spec.train_tasks)

    def check(self, temperature: Temperature) -> None:
        """Check that the temperature is what the weights need.

        Raises:
            ConfigurationError: if it is not.
        """

    def forward(self, log_alpha_T: Tensor) -> Tensor:
        """Return the trained tasks' weights ``[T]`` for log temperatures ``[T]``, detached."""
        raise NotImplementedError


class EqualWeights(TaskWeighting):
    """Every task counts alike.

    Args:
        spec: the tasks.
    """

    def forward(self, log_alpha_T: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(log_alpha_T)


class ByTemperature(TaskWeighting):
    """Weight tasks of low temperature more: ``T softmax(-log alpha)`` (Yang et al. 2020).

    A task whose policy has become sharp is learned, and the others should not disturb it. Needs one
    temperature per task.

    Args:
        spec: the tasks.
    """

    def check(self, temperature: Temperature) -> None:
        """Refuse one temperature for all: it would weight nothing."""
        if not temperature.per_task:
            raise ConfigurationError(
                "task_weighting ByTemperature needs one temperature per task:"
                " set temperature.init_args.per_task to true"
            )

    def forward(self, log_alpha_T: Tensor) -> Tensor:
        """Return ``T softmax(-log alpha)``."""
        return len(log_alpha_T) * torch.softmax(-log_alpha_T.detach(), 0)


class ByHand(TaskWeighting):
    """Weights given task by task; tasks that are not named have 1. Only their proportions matter.

    Args:
        spec: the tasks.
        weights: task name to weight, 0 or above.

    Raises:
        ConfigurationError: if a task is unknown or not trained on, a weight negative, or none above
            0.
    """

    weight_T: Tensor

    def __init__(self, spec: EnvSpec, weights: dict[str, float]) -> None:
        super().__init__(spec)
        trained = [spec.task_names[i] for i in spec.train_tasks]
        known_tasks(list(weights), spec.task_names)
        if excluded := [name for name in weights if name not in trained]:
            raise ConfigurationError(
                f"{', '.join(excluded)}: excluded from training, and so without a weight; leave out"
            )
        weight_T = torch.tensor([float(weights.get(name, 1.0)) for name in trained])
        if not (weight_T.isfinite().all() and (weight_T >= 0).all() and weight_T.sum() > 0):
            raise ConfigurationError(
                f"task weights {weights}: give numbers of 0 and above, and at least one above 0"
            )
        self.register_buffer("weight_T", weight_T * len(trained) / weight_T.sum(), persistent=False)

    def forward(self, log_alpha_T: Tensor) -> Tensor:
        """Return the weights given, scaled to the sum ``T``."""
        return self.weight_T
