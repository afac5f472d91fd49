"""What belongs to single tasks: declared once, by ``task_axes``, and everything derived from it.

Shapes: ``T`` tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import Parameter


class TaskAxis(NamedTuple):
    """An axis of a tensor with one block per task, in the order of the tasks.

    The blocks have equal sizes and fill the axis from ``start`` to its end. Tasks share the entries
    before ``start``.
    """

    axis: int = 0
    start: int = 0
    has_mean: bool = True
    """Whether the mean of the trained tasks' blocks can replace the block of an untrained or a new
    task. It cannot for networks of several layers, whose hidden units have another order in each
    task, nor for statistics."""
    task: str | None = None
    """Name of the one task that the whole tensor belongs to; None for an axis of all tasks."""

    def blocks(self, tensor: Tensor, num_tasks: int) -> Tensor:
        """Return the view ``[T, ...]`` of a tensor's blocks."""
        region = tensor.narrow(self.axis, self.start, tensor.shape[self.axis] - self.start)
        return region.unflatten(self.axis, (num_tasks, -1)).movedim(self.axis, 0)


@runtime_checkable
class HasTaskAxes(Protocol):
    """A module that declares which of its tensors have something for each task."""

    def task_axes(self) -> Mapping[str, TaskAxis | None]:
        """Return the axis of each tensor that has one, by the tensor's name in the module.

        Inner modules with this method declare their own tensors; the declaration of an outer module
        takes precedence, and None withdraws one. An entry of the extra state is named
        ``_extra_state.KEY``.
        """


def task_axes(module: nn.Module, prefix: str = "") -> dict[str, TaskAxis]:
    """Return the declared axes of a module and all modules in it, by full name.

    Args:
        module: the module.
        prefix: beginning of the names.
    """
    axes: dict[str, TaskAxis | None] = {}
    for name, child in module.named_children():
        axes |= task_axes(child, f"{prefix}{name}.")
    if isinstance(module, HasTaskAxes):
        axes |= {f"{prefix}{name}": axis for name, axis in module.task_axes().items()}
    return {name: axis for name, axis in axes.items() if axis is not None}


def shared_parameters(network: nn.Module) -> list[Parameter]:
    """Return the parameters that several tasks use, from input to output.

    These are all except those that consist of the tasks' blocks. The parameters of task
    conditionings are inputs of the network, and count as shared.
    """
    axes = task_axes(network)
    inputs = {
        id(parameter)
        for module in network.modules()
        if getattr(module, "is_task_input", False)
        for parameter in module.parameters()
    }
    return [
        parameter
        for name, parameter in network.named_parameters()
        if id(parameter) in inputs or name not in axes or axes[name].start > 0
    ]


def last_shared_weight(network: nn.Module) -> Parameter | None:
    """Return the weights of the last layer that all tasks share; None if they share nothing."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    backwards = shared_parameters(network)[::-1]
    weights = [p for p in backwards if p.ndim > 1 and "bias" not in names[id(p)]]
    return next(iter([*weights, *backwards]), None)


@torch.no_grad()
def fill_untrained(module: nn.Module, num_tasks: int, train_tasks: Sequence[int]) -> None:
    """Replace the blocks of untrained tasks, in place, by the mean of the trained tasks' blocks.

    Untrained tasks are unseen, as in HiP-BMDP (Zhang et al. 2021, arXiv 2007.07206): their input is
    the mean of the trained tasks' inputs, and everything computed from it follows. The mean of
    linear heads has the mean of their outputs.

    Args:
        module: contains the parts that depend on the task.
        num_tasks: number of tasks, ``T``.
        train_tasks: the trained tasks.
    """
    untrained = [task for task in range(num_tasks) if task not in train_tasks]
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, axis in task_axes(module).items():
        if axis.has_mean and name in tensors:
            blocks_T = axis.blocks(tensors[name], num_tasks)
            blocks_T[untrained] = blocks_T[list(train_tasks)].mean(0)


def parameters_without_mean(module: nn.Module) -> list[str]:
    """Return the names of the parameters that ``fill_untrained`` cannot replace."""
    axes = task_axes(module)
    return [
        name for name, _ in module.named_parameters() if name in axes and not axes[name].has_mean
    ]
