"""What every architecture is.

Shapes: ``B`` batch, ``T`` trained tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError


class Network(nn.Module):
    """Features and a task in, numbers out; built by a factory ``(in_dim, out_dim, num_tasks) -> Network``."""

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features ``[B, in_dim]`` and tasks ``[B]`` (integers) to ``[B, out_dim]``."""
        raise NotImplementedError

    def shared_parameters(self) -> Iterator[Parameter]:
        """Yield the parameters that several tasks use, from input to output; a gradient method works on these."""
        return self.parameters()

    def last_shared_weight(self) -> Parameter:
        """Return the weights of the last layer that all tasks share: the last matrix of ``shared_parameters``."""
        return max(
            reversed(list(self.shared_parameters())), key=lambda parameter: parameter.ndim > 1
        )

    def mask_losses(self, loss_T: Tensor) -> Tensor:
        """Return the tasks' losses ``[T]``, with 0 for a task that this network must not learn from now."""
        return loss_T

    def after_step(self, loss_T: Tensor, task_T: Tensor, generator: torch.Generator) -> None:
        """Repair what a step of the optimizer cannot.

        Args:
            loss_T: the losses that the step was made for, before they were masked.
            task_T: which task each of them is of.
            generator: for draws, on the network's device.
        """


def uniform_(parameter: Tensor, bound: float, fan_in: int) -> None:
    """Fill an output layer's parameter uniformly within ``bound``, or PyTorch's ``1 / sqrt(fan_in)`` if it is 0."""
    bound = bound or 1 / math.sqrt(fan_in)
    nn.init.uniform_(parameter, -bound, bound)


def he_linear(in_dim: int, out_dim: int) -> nn.Linear:
    """Return a linear map with He-uniform weights and zero biases."""
    linear = nn.Linear(in_dim, out_dim)
    nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
    nn.init.zeros_(linear.bias)
    return linear


def check_layers(width: int, depth: int) -> None:
    """Refuse hidden layers without a feature, and a network without any.

    Raises:
        ConfigurationError: if one is below 1.
    """
    if depth < 1 or width < 1:
        raise ConfigurationError(
            f"a network's depth is {depth} and its width {width}: both must be at least 1"
        )
