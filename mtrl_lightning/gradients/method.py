"""The base class of gradient methods, and the mean of the tasks' gradients.

A function below the classes computes outputs in a form that is cheap to differentiate per task.

Shapes: ``R`` trained tasks, ``n`` rows of a task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec


class TaskParameters(NamedTuple):
    """The parameters that the tasks' losses train."""

    shared: list[Parameter]
    """Parameters used by several tasks, whose gradients may conflict."""
    own: list[Parameter]
    """All others, such as one output layer per task: they get the gradient of the mean loss."""
    last_shared: list[Parameter]
    """The weights of each network's last shared layer; a subset of ``shared``."""


class GradientMethod(nn.Module):
    """Combine the tasks' losses into gradients; built by a factory ``(spec) -> GradientMethod``.

    A gradient method is a module, so that its state moves between devices and is part of
    checkpoints.

    Args:
        spec: the tasks.
    """

    is_one_pass = False
    """Whether the losses are differentiated in one pass instead of task by task."""
    depends_on_values = True
    """Whether a task's gradient depends on the value of its or others' losses. If not, several
    processes average losses and gradients in one message."""
    averages_gradients = False
    """Whether ``backward`` averages the gradients over processes before it combines them, as
    ``TaskGradients`` does. Otherwise ``.grad`` is averaged after ``backward``."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.num_trained = spec.num_trained
        self._statistics: dict[str, Tensor] = {}

    def check(self, parameters: TaskParameters) -> None:
        """Check that the tasks share parameters, which one-pass methods do not require."""
        if not self.is_one_pass and not parameters.shared:
            raise ConfigurationError(
                f"the tasks share no parameters, so {type(self).__name__} has no effect:"
                " use gradients.Mean, or another network"
            )

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set ``.grad`` of the parameters, which must have been cleared.

        Args:
            loss_R: one loss per task; with several processes, the values are those of the global
                batch, and the graph that of this process' rows.
            parameters: the parameters that the losses train.
            generator: random generator on the losses' device; the same on all processes.
        """
        raise NotImplementedError

    def after_step(self, losses: Callable[[], Tensor]) -> None:
        """Update the method's own state after the optimizer step.

        Args:
            losses: recomputes the losses ``[R]`` of the same batch, with the same noise and
                targets, without gradients.
        """

    def metrics(self) -> dict[str, Tensor]:
        """Return statistics of the last call as scalar tensors."""
        return self._statistics


class Mean(GradientMethod):
    """Use the gradient of the mean loss.

    Args:
        spec: the tasks.
    """

    is_one_pass = True
    depends_on_values = False

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self._weight_R = torch.full((self.num_trained,), 1 / self.num_trained)

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set every parameter's ``.grad`` to the gradient of the mean loss."""
        self._weight_R = self._weight_R.to(loss_R)
        one_pass(loss_R, self._weight_R, parameters)


def one_pass(loss_R: Tensor, weight_R: Tensor, parameters: TaskParameters) -> None:
    """Set every parameter's ``.grad`` to the gradient of ``sum_R weight loss``, in one pass."""
    trained = [p for p in parameters.shared + parameters.own if p.requires_grad]
    loss_R.backward(weight_R, inputs=trained)


def per_task_forward(
    method: GradientMethod | None, function: Callable[..., Tensor], dim: int, *rows: Tensor
) -> Tensor:
    """Return ``function(*rows)``, on a CPU computed task by task.

    For losses that are differentiated one by one: ``R`` backward passes, one for each task's loss,
    then cost about as much as one, because a pass does not enter the other tasks' graphs. This is
    only faster on a CPU, where small matrix products are cheap. A GPU runs all passes as one
    batched pass, which cannot skip rows with zero gradients.

    Args:
        method: the method that differentiates the losses; a one-pass method does not need one
            graph per task. None if each loss is differentiated.
        function: maps rows ``[R, n, ...]`` to an output with the tasks in dimension ``dim``.
        dim: dimension of the tasks in the output.
        rows: tensors ``[R, n, ...]``.
    """
    if rows[0].device.type != "cpu" or (method and method.is_one_pass):
        return function(*rows)
    parts = zip(*(x_Rn.split(1) for x_Rn in rows), strict=True)
    joined: Tensor = _JoinTasks.apply(dim, *(function(*part) for part in parts))
    return joined


class _JoinTasks(torch.autograd.Function):
    """Concatenate the tasks' outputs; the backward pass skips tasks with zero gradients."""

    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim = dim
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = gradients[0].split(1, ctx.dim)
        return None, *(part if bool(part.any()) else None for part in parts)
