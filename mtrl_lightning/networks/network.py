"""The base class of all architectures, and the initialization they share.

Shapes: ``B`` batch, ``R`` trained tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter


class TaskModule(nn.Module):
    """A module that says which of its parameters several tasks use."""

    def shared_parameters(self) -> Iterator[Parameter]:
        """Yield the parameters that several tasks use, from input to output.

        Gradient methods resolve the conflicts between tasks on these parameters.
        """
        return self.parameters()

    def last_shared_weight(self) -> Parameter:
        """Return the weights of the last layer that all tasks share.

        This is the last matrix of ``shared_parameters``.
        """
        backwards = reversed(list(self.shared_parameters()))
        return max(backwards, key=lambda parameter: parameter.ndim > 1)  # max returns the first one

    def mask_losses(self, loss_R: Tensor) -> Tensor:
        """Return the tasks' losses ``[R]``, with 0 for each task to leave out of this update."""
        return loss_R

    def after_step(self, loss_R: Tensor, task_R: Tensor, generator: torch.Generator) -> None:
        """Change parameters after the optimizer's step, such as those of an exploding task.

        Args:
            loss_R: losses of the update, before they were masked.
            task_R: task of each loss.
            generator: for random draws, on the network's device.
        """


class Network(TaskModule):
    """Map features and a task to outputs.

    Built by a factory ``(in_dim, out_dim, spec) -> Network``.
    """

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features ``[B, in_dim]`` and tasks ``[B]`` (integers) to ``[B, out_dim]``."""
        raise NotImplementedError

    def scale_outputs(self, scale_T: Tensor, shift_T: Tensor) -> bool:
        """Multiply each task's outputs by its scale and add its shift, ``[T]`` each.

        Returns:
            Whether this network can: it has one output layer per task.
        """
        return False


def is_captured() -> bool:
    """Return whether operations are recorded, by a compiler, an export or a trace.

    What is recorded must not depend on the values of tensors.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def uniform_(parameter: Tensor, bound: float, fan_in: int) -> None:
    """Fill a parameter uniformly within ``bound``, or ``1 / sqrt(fan_in)`` (PyTorch) if it is 0."""
    bound = bound or 1 / math.sqrt(fan_in)
    nn.init.uniform_(parameter, -bound, bound)


def he_linear(in_dim: int, out_dim: int) -> nn.Linear:
    """Return a linear layer with He-uniform weights and zero biases."""
    linear = nn.Linear(in_dim, out_dim)
    nn.init.kaiming_uniform_(linear.weight, nonlinearity="relu")
    nn.init.zeros_(linear.bias)
    return linear
