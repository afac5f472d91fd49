"""The base class of all architectures, selection of each row's task values, and initialization.

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class TaskModule(nn.Module):
    """A module that may have parameters of single tasks; see ``task_axes``."""

    def mask_losses(self, loss_R: Tensor) -> Tensor:
        """Return the tasks' losses ``[R]``, with 0 for each task to leave out of this update."""
        return loss_R

    def after_step(self, loss_R: Tensor, task_R: Tensor, generator: torch.Generator) -> None:
        """Modify parameters after the optimizer step, such as those of an exploding task.

        Args:
            loss_R: losses of the update, before masking.
            task_R: task of each loss.
            generator: random generator on the network's device.
        """


class Network(TaskModule):
    """Map features and a task to outputs.

    Inputs are rows of any tasks ``[B, in_dim]``, as in a rollout, or a training batch
    ``[R, n, in_dim]``: ``n`` rows of each trained task, in the order of the tasks.

    Built by a factory ``(in_dim, out_dim, spec) -> Network``. A network with parameters for each
    task declares them in ``task_axes``.
    """

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features and tasks to outputs.

        Args:
            x_BD: features, ``[B, in_dim]`` or ``[R, n, in_dim]``.
            task_B: the task of each row, integers ``[B]`` or ``[R, n]``.

        Returns:
            Outputs ``[B, out_dim]`` or ``[R, n, out_dim]``.
        """
        raise NotImplementedError

    @property
    def scale_outputs(self) -> Callable[[Tensor, Tensor], None] | None:
        """Multiplies each task's outputs by its scale and adds its shift, ``[T]`` each.

        None unless there is one linear output layer per task.
        """
        return None


def group_values(value_T: Tensor, task_Rn: Tensor) -> Tensor:
    """Select the value ``[R, ...]`` of each group's task from values ``[T, ...]``.

    With groups of all tasks, which are in order, no indexing is needed, whose backward would sort
    on a GPU.
    """
    return value_T if len(task_Rn) == len(value_T) else value_T[task_Rn[:, 0]]


def task_values(value_T: Tensor, task_B: Tensor) -> Tensor:
    """Return the value of each row's task; all rows of a group have the same task.

    Args:
        value_T: values ``[T, ...]``.
        task_B: the task of each row, integers ``[B]`` or ``[R, n]``.

    Returns:
        Values ``[B, ...]``, or a view ``[R, n, ...]``.
    """
    if task_B.ndim == 1:
        return value_T[task_B]
    value_R = group_values(value_T, task_B)
    return value_R[:, None].expand(*task_B.shape, *value_T.shape[1:])


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


def output_linear(in_dim: int, out_dim: int, bound: float) -> nn.Linear:
    """Return a linear layer whose weights and biases ``uniform_`` fills within ``bound``."""
    linear = nn.Linear(in_dim, out_dim)
    uniform_(linear.weight, bound, in_dim)
    uniform_(linear.bias, bound, in_dim)
    return linear


def is_captured() -> bool:
    """Return whether operations are being compiled, exported or traced.

    Such operations must not depend on the values of tensors.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
