"""The base class of all architectures, declarations of task parameters, and initialization.

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``B`` rows of any tasks.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec


class TaskAxis(NamedTuple):
    """A tensor's axis with one block per task; tasks share the entries around the blocks."""

    axis: int = 0
    """The axis."""
    start: int = 0
    """Index at which the first task's block starts."""
    block: int = 1
    """Size of each block."""
    has_mean: bool = True
    """Whether the mean of several tasks' blocks can start a new task: false for several layers of
    its own, whose hidden units are in another order in each task."""


@runtime_checkable
class HasTaskAxes(Protocol):
    """A module that declares which of its tensors have something for each task."""

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the axis of each tensor that has one, by its name in the module's ``state_dict``.

        Inner modules that have this method declare their own. A tensor of the extra state is named
        ``_extra_state.KEY``.
        """


@runtime_checkable
class HasTaskOutputs(Protocol):
    """A module with task-specific inputs or outputs, such as an embedding or heads.

    Its ``forward`` takes the rows' tasks as the last argument and returns a row for each.
    """

    def own_tasks(self, train_tasks: Sequence[int]) -> Collection[int]:
        """Return the tasks with parameters or inputs of their own, given the trained ones.

        Those of a module that learns are ``train_tasks``; one that is given something for every
        task, such as an embedding of its description, has all of them.

        Raises:
            ConfigurationError: if nothing can replace the parameters of an untrained task.
        """


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

        Raises:
            ConfigurationError: if the tasks share no parameter.
        """
        backwards = list(self.shared_parameters())[::-1]
        if not backwards:
            raise ConfigurationError(
                f"{type(self).__name__} shares no layer between tasks:"
                " set the gradient method to gradients.Mean, the mean of the losses"
            )
        return max(backwards, key=lambda parameter: parameter.ndim > 1)  # max returns the first one

    def mask_losses(self, loss_R: Tensor) -> Tensor:
        """Return the tasks' losses ``[R]``, with 0 for each task to leave out of this update."""
        return loss_R

    def after_step(self, loss_R: Tensor, task_R: Tensor, generator: torch.Generator) -> None:
        """Change parameters after the optimizer's step, such as those of an exploding task.

        Args:
            loss_R: losses of the update, before they were masked.
            task_R: task of each loss.
            generator: of random numbers, on the network's device.
        """


class Network(TaskModule):
    """Map features and a task to outputs.

    Rows are of any tasks ``[B, in_dim]``, as an agent acts, or a learning batch
    ``[R, n, in_dim]``: ``n`` rows of each trained task, in the order of the tasks.

    Built by a factory ``(in_dim, out_dim, spec) -> Network``. A network with parameters for each
    task declares them: it defines ``shared_parameters``, and ``own_tasks`` as in
    ``HasTaskOutputs``. Its constructor checks this.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the constructor check the declarations after it has built all parts.

        Raises:
            ConfigurationError: if the class has ``scale_outputs`` and not ``scales_outputs``.
        """
        super().__init_subclass__(**kwargs)
        has_scaling = cls.scale_outputs is not Network.scale_outputs
        if has_scaling and cls.scales_outputs is Network.scales_outputs:
            raise ConfigurationError(
                f"{cls.__name__} overrides scale_outputs and not scales_outputs, so PopArt would"
                " not call it: define the property scales_outputs, which returns True;"
                " scale_outputs returns nothing"
            )
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]

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
    def scales_outputs(self) -> bool:
        """Whether it has ``scale_outputs``: one linear output layer per task.

        A class that overrides one of the two overrides the other.
        """
        return False

    def scale_outputs(self, scale_T: Tensor, shift_T: Tensor) -> None:
        """Multiply each task's outputs by its scale and add its shift, ``[T]`` each."""
        raise NotImplementedError


def group_values(value_T: Tensor, task_Rn: Tensor) -> Tensor:
    """Return the value ``[R, ...]`` of each group's task, of values ``[T, ...]``.

    Groups of all tasks have them in their order. They need no index, whose gradient a GPU would
    have to sort.
    """
    return value_T if len(task_Rn) == len(value_T) else value_T[task_Rn[:, 0]]


def task_values(value_T: Tensor, task_B: Tensor) -> Tensor:
    """Return the value of each row's task; rows in groups have one task in each.

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


def _checked(constructor: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def checked(self: Network, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        spec = arguments.get("spec")
        # the constructor of a base class has not built all parts
        if type(self).__init__ is checked and isinstance(spec, EnvSpec) and "in_dim" in arguments:
            from mtrl_lightning.networks.declared import check_declared

            check_declared(
                self, list(self.shared_parameters()), arguments["in_dim"], spec.num_tasks
            )

    return checked


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
    """Return whether operations are recorded, by a compiler, an export or a trace.

    Recorded operations must not depend on the values of tensors.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing()
