"""The base class of gradient methods, the parameters they work on, and the simplest: the mean.

Shapes: ``R`` trained tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.spec import EnvSpec


class TaskParameters(NamedTuple):
    """The parameters that the tasks' losses train."""

    shared: list[Parameter]
    """Parameters that several tasks use: tasks may conflict on these."""
    own: list[Parameter]
    """All others, such as one output layer per task: they get the gradient of the mean loss."""
    last_shared: list[Parameter]
    """The weights of each network's last shared layer; they are among ``shared``."""


class GradientMethod(nn.Module):
    """Turn one loss per task into gradients; built by a factory ``(spec) -> GradientMethod``.

    A gradient method is a module, so that its state moves with the device and is part of the
    checkpoint.

    Args:
        spec: the tasks.
    """

    is_one_pass = False
    """Whether the losses are differentiated in one pass, and not task by task."""
    depends_on_values = True
    """Whether the gradient of a task depends on the value of its loss or of others. Where it does
    not, several processes average losses and gradients in one message."""
    averages_gradients = False
    """Whether ``backward`` itself averages the gradients over the processes, before it combines
    them, as ``TaskGradients`` does. The ``.grad`` of others is averaged after ``backward``."""
    solves_on_host = False
    """Whether ``backward`` computes weights on the CPU: a GPU is waited for in every update."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.num_trained = spec.num_trained
        self._statistics: dict[str, Tensor] = {}

    def check(self, parameters: TaskParameters) -> None:
        """Check that the tasks share parameters; a method with one pass needs none."""
        if not self.is_one_pass and not parameters.shared:
            raise ConfigurationError(
                f"the tasks share no parameter, so {type(self).__name__} has no effect:"
                " use gradients.Mean, or another network"
            )

    def backward(
        self, loss_R: Tensor, parameters: TaskParameters, generator: torch.Generator
    ) -> None:
        """Set ``.grad`` of the parameters, which must have been cleared.

        Args:
            loss_R: one loss per task; with several processes the values of the joined batch, whose
                graph is that of this process' rows.
            parameters: the parameters that the losses train.
            generator: of random numbers, on the losses' device; the same on all processes.
        """
        raise NotImplementedError

    def after_step(self, losses: Callable[[], Tensor]) -> None:
        """Update the method's own state after the optimizer's step.

        Args:
            losses: recomputes the losses ``[R]`` of the same batch, with the same noise and targets
                and without a graph.
        """

    def metrics(self) -> dict[str, Tensor]:
        """Return statistics of the last call as scalar tensors."""
        return self._statistics


class Mean(GradientMethod):
    """Use the gradient of the mean loss, which is the gradient of the whole batch.

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
