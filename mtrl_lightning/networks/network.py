"""The base class of all architectures, tensors of single tasks, and initialization.

Tensors of single tasks are declared by ``task_axes``, from which everything else is derived.

Shapes: ``T`` tasks, ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.checks import one_of
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec

UntrainedParameters = Literal["mean", "own"]
"""``mean``: the mean over the trained tasks; ``own``: a task's own, untrained parameters."""


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


class TaskAxis(NamedTuple):
    """An axis of a tensor with one block per task, in the order of the tasks.

    The blocks have equal sizes and fill the axis from ``start`` to its end. Tasks share the entries
    before ``start``.
    """

    axis: int = 0
    start: int = 0
    has_mean: bool = True
    """Whether the mean of the trained tasks' blocks can replace the block of an untrained or new
    task. Not so for multi-layer networks, whose hidden units are permuted between tasks, nor for
    statistics."""
    task: str | None = None
    """Name of the single task that the entire tensor belongs to; None for an axis of all tasks."""

    def blocks(self, tensor: Tensor, num_tasks: int) -> Tensor:
        """Return the view ``[T, ...]`` of a tensor's blocks."""
        region = tensor.narrow(self.axis, self.start, tensor.shape[self.axis] - self.start)
        return region.unflatten(self.axis, (num_tasks, -1)).movedim(self.axis, 0)


@runtime_checkable
class HasTaskAxes(Protocol):
    """A module that declares which of its tensors have an axis of tasks."""

    def task_axes(self) -> Mapping[str, TaskAxis | None]:
        """Return the axis of each tensor that has one, by the tensor's name in the module.

        Submodules with this method declare their own tensors; the declaration of a parent module
        takes precedence, and None withdraws one. An entry of the extra state is named
        ``_extra_state.KEY``.
        """


def task_axes(module: nn.Module, prefix: str = "") -> dict[str, TaskAxis]:
    """Return the declared axes of a module and all modules in it, by full name.

    Args:
        module: the module.
        prefix: prefix of the names.
    """
    axes: dict[str, TaskAxis | None] = {}
    for name, child in module.named_children():
        axes |= task_axes(child, f"{prefix}{name}.")
    if isinstance(module, HasTaskAxes):
        axes |= {f"{prefix}{name}": axis for name, axis in module.task_axes().items()}
    return {name: axis for name, axis in axes.items() if axis is not None}


def shared_parameters(network: nn.Module) -> list[Parameter]:
    """Return the parameters used by several tasks, from input to output.

    These are all parameters except those with one block per task. The parameters of task
    conditionings are inputs of the network and count as shared.
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


class UntrainedTasks:
    """The tasks that are evaluated without being trained, and the parameters they use.

    Untrained tasks are unseen, as in HiP-BMDP (Zhang et al. 2021, arXiv 2007.07206): their task
    input is the mean of the trained tasks' inputs. The mean of linear heads yields the mean of
    their outputs.

    Args:
        spec: the tasks.
        parameters: parameters of the untrained tasks.
    """

    def __init__(self, spec: EnvSpec, parameters: UntrainedParameters = "mean") -> None:
        one_of(get_args(UntrainedParameters), untrained_tasks=parameters)
        self._spec = spec
        self.is_untrained_T = ~np.isin(np.arange(spec.num_tasks), spec.train_tasks)
        """True for the tasks that are not trained."""
        self._has_mean = parameters == "mean" and bool(self.is_untrained_T.any())
        described = "the mean of the trained tasks'" if self._has_mean else "as initialized"
        self.explanation = f"Parameters of a task are {described}"

    @property
    def summary(self) -> str:
        """Names of the untrained tasks and an explanation; empty if there are none."""
        if not self.is_untrained_T.any():
            return ""
        names = [self._spec.task_names[task] for task in np.flatnonzero(self.is_untrained_T)]
        return f"Evaluated without training: {', '.join(names)}. {self.explanation}"

    def check(self, modules: Mapping[str, nn.Module]) -> None:
        """Check that the policy has no per-task parameters whose mean is not meaningful.

        Args:
            modules: the networks by name.
        """
        for name, module in modules.items() if self._has_mean else ():
            axes = task_axes(module)
            for parameter, _ in module.named_parameters():
                if parameter in axes and not axes[parameter].has_mean:
                    raise ConfigurationError(
                        f"some tasks are evaluated without being trained, but {name} has layers per"
                        f" task ({parameter}), whose mean is not meaningful: choose another"
                        " network, or set model.init_args.untrained_tasks to own (these layers keep"
                        " their initial weights)"
                    )

    @torch.no_grad()
    def fill(self, modules: Mapping[str, nn.Module]) -> None:
        """Replace the untrained tasks' blocks in place with the mean of the trained tasks' blocks.

        Training does not use them.

        Args:
            modules: the policy's networks by name.
        """
        for module in modules.values() if self._has_mean else ():
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for name, axis in task_axes(module).items():
                if axis.has_mean and name in tensors:
                    blocks_T = axis.blocks(tensors[name], self._spec.num_tasks)
                    blocks_T[self.is_untrained_T] = blocks_T[list(self._spec.train_tasks)].mean(0)


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
