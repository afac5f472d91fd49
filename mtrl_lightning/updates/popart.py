"""The scale of a critic's targets.

Shapes: ``T`` tasks, ``B`` rows of any tasks ``[B]`` or of a training batch ``[R, n]``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.checks import above, within
from mtrl_lightning.networks import Network, TaskAxis, TaskModule
from mtrl_lightning.networks.network import task_values
from mtrl_lightning.spec import EnvSpec
from mtrl_lightning.utils.moments import union


class ReturnScale(TaskModule):
    """The scale of a critic's targets; the base class leaves them unchanged.

    Built by a factory ``(spec, critic) -> ReturnScale``.

    Args:
        spec: the tasks.
        critic: the network whose outputs are scaled.
    """

    def __init__(self, spec: EnvSpec, critic: Network) -> None:
        super().__init__()

    def forward(self, output_B1: Tensor, task_B: Tensor) -> Tensor:
        """Map the critic's outputs ``[B, 1]`` to normalized values ``[B]``."""
        return output_B1.float().squeeze(-1)

    def normalize(self, value_B: Tensor, task_B: Tensor) -> Tensor:
        """Map values ``[B]`` to normalized values."""
        return value_B

    def denormalize(self, value_B: Tensor, task_B: Tensor) -> Tensor:
        """Map normalized values ``[B]`` to values."""
        return value_B

    def observe(self, mean_T: Tensor, variance_T: Tensor, count_T: Tensor) -> None:
        """Observe the moments of each task's returns; a count of 0 means no returns."""


class PopArt(ReturnScale):
    """Learn targets of mean 0 and standard deviation 1 for each task.

    Van Hasselt et al. 2016, "Learning values across many orders of magnitude" (arXiv 1602.07714),
    with statistics per task as in Hessel et al. 2018 (arXiv 1809.04474). When the statistics
    change, each task's output layer is rescaled to preserve its values. A critic without one output
    layer per task (``Network.scale_outputs``) gets a learned scale and offset per task.

    Args:
        spec: the tasks.
        critic: the network whose outputs are scaled.
        step_size: weight of an iteration's returns in the moving averages, above 0 and at most 1
            (``beta`` in the paper, per minibatch).
        min_std: lower bound of the standard deviation, above 0 (1e-4 in the paper).
    """

    mean_T: Tensor
    variance_T: Tensor
    is_known_T: Tensor

    def __init__(
        self, spec: EnvSpec, critic: Network, *, step_size: float = 0.3, min_std: float = 1e-4
    ) -> None:
        super().__init__(spec, critic)
        within(0, 1, above_low=True, step_size=step_size)
        above(0, min_std=min_std)
        self.step_size = step_size
        self.min_std = min_std
        num_tasks = spec.num_tasks
        self.register_buffer("mean_T", torch.zeros(num_tasks))
        self.register_buffer("variance_T", torch.ones(num_tasks))
        self.register_buffer("is_known_T", torch.zeros(num_tasks, dtype=torch.bool))
        self._scale_outputs = critic.scale_outputs
        self.weight_T: Parameter | None = None
        self.bias_T: Parameter | None = None
        if self._scale_outputs is None:
            self.weight_T = nn.Parameter(torch.ones(num_tasks))
            self.bias_T = nn.Parameter(torch.zeros(num_tasks))

    @property
    def std_T(self) -> Tensor:
        """The standard deviation of each task's returns, ``[T]``."""
        return self.variance_T.sqrt().clamp(min=self.min_std)

    def forward(self, output_B1: Tensor, task_B: Tensor) -> Tensor:
        """Map the critic's outputs ``[B, 1]`` to normalized values ``[B]``."""
        value_B = super().forward(output_B1, task_B)
        if self.weight_T is None or self.bias_T is None:
            return value_B
        weight_B = task_values(self.weight_T, task_B)
        return weight_B * value_B + task_values(self.bias_T, task_B)

    def normalize(self, value_B: Tensor, task_B: Tensor) -> Tensor:
        """Map values ``[B]`` to normalized values."""
        return (value_B - task_values(self.mean_T, task_B)) / task_values(self.std_T, task_B)

    def denormalize(self, value_B: Tensor, task_B: Tensor) -> Tensor:
        """Map normalized values ``[B]`` to values."""
        return value_B * task_values(self.std_T, task_B) + task_values(self.mean_T, task_B)

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of statistics, scales and offsets."""
        statistics = dict.fromkeys(("mean_T", "variance_T", "is_known_T"), TaskAxis(has_mean=False))
        return statistics | {name: TaskAxis() for name, _ in self.named_parameters()}

    @torch.no_grad()
    def observe(self, mean_T: Tensor, variance_T: Tensor, count_T: Tensor) -> None:
        """Update the statistics, and rescale the outputs to preserve the values.

        A task's first statistics are adopted without rescaling: its outputs are initially near 0,
        so its values start at the mean return.
        """
        is_seen_T = count_T > 0
        is_first_T = is_seen_T & ~self.is_known_T
        step_T = torch.where(is_first_T, 1.0, self.step_size) * is_seen_T
        old_mean_T = self.mean_T.clone()
        old_std_T = self.std_T
        # the moments of a mixture of the previous and the new returns
        new_mean_T, new_variance_T = union(self.mean_T, self.variance_T, mean_T, variance_T, step_T)
        self.mean_T.copy_(new_mean_T)
        self.variance_T.copy_(new_variance_T)
        self.is_known_T |= is_seen_T
        is_kept_T = ~is_first_T
        ratio_T = torch.where(is_kept_T, old_std_T / self.std_T, 1.0)
        offset_T = torch.where(is_kept_T, (old_mean_T - self.mean_T) / self.std_T, 0.0)
        if self._scale_outputs is not None:
            self._scale_outputs(ratio_T, offset_T)
        elif self.weight_T is not None and self.bias_T is not None:
            self.weight_T.mul_(ratio_T)
            self.bias_T.mul_(ratio_T).add_(offset_T)
