"""From the tasks' losses to a step of an optimizer: what actor and critics have in common.

Shapes: ``T`` trained tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.gradients import GradientMethod, TaskParameters
from mtrl_lightning.networks import Network


class Descent:
    """The way of a network's task losses to its parameters.

    Args:
        method: how the tasks' losses become one gradient.
        networks: what is trained; more than one for an ensemble.
        encoder: trained with them, if anything.
        max_norm: global norm to which the gradient is clipped; None for no clipping.

    Raises:
        ConfigurationError: if the norm is not above 0, or the gradient method has nothing to work
            on.
    """

    def __init__(
        self,
        method: GradientMethod,
        networks: Iterable[nn.Module],
        encoder: nn.Module | None,
        max_norm: float | None,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ConfigurationError(
                "actor_max_grad_norm and critic_max_grad_norm must be above 0, or null for no"
                " clipping"
            )
        self._method, self._networks = method, [cast(Network, network) for network in networks]
        self._max_norm = float("inf") if max_norm is None else max_norm
        self.parameters = task_parameters(self._networks, encoder)
        self._all = self.parameters.shared + self.parameters.own
        method.check(self.parameters)

    def step(
        self,
        loss_T: Tensor,
        weight_T: Tensor,
        task_T: Tensor,
        optimizer: Optimizer,
        losses: Callable[[], Tensor],
        generator: torch.Generator,
        device_generator: torch.Generator,
    ) -> dict[str, Tensor]:
        """Make one step; return statistics.

        Args:
            loss_T: one loss a task.
            weight_T: how much each counts.
            task_T: which tasks they are of.
            optimizer: of the networks and the encoder.
            losses: computes the same losses again.
            generator: for draws of the gradient method, on the CPU.
            device_generator: for draws of the networks, on their device.
        """
        kind = loss_T.device.type
        precision = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

        def again() -> Tensor:
            with torch.autocast(*precision):
                new_T = losses()
            return self._learned_from(new_T) * weight_T

        optimizer.zero_grad()
        with torch.autocast(kind, enabled=False):  # which would round the products of gradients
            self._method.backward(self._learned_from(loss_T) * weight_T, self.parameters, generator)
            norm = nn.utils.clip_grad_norm_(self._all, self._max_norm)
            optimizer.step()
            for network in self._networks:
                network.after_step(loss_T.detach(), task_T, device_generator)
            with torch.no_grad():
                self._method.after_step(again)
        return {"loss": loss_T.mean(), "grad_norm": norm, **self._method.metrics()}

    def _learned_from(self, loss_T: Tensor) -> Tensor:
        for network in self._networks:
            loss_T = network.mask_losses(loss_T)
        return loss_T


def task_parameters(networks: Sequence[Network], encoder: nn.Module | None) -> TaskParameters:
    """Return what is trained, encoder first, network by network; frozen parameters are left out."""
    shared = _trained(encoder.parameters()) if encoder is not None else []
    last = [parameter for parameter in shared if parameter.ndim > 1][-1:]
    own: list[Parameter] = []
    if any(True for network in networks for _ in network.shared_parameters()):
        last = [network.last_shared_weight() for network in networks]
    for network in networks:
        mine = _trained(network.shared_parameters())
        known = {id(parameter) for parameter in mine}
        shared += mine
        own += [
            parameter for parameter in _trained(network.parameters()) if id(parameter) not in known
        ]
    return TaskParameters(shared, own, last)


def _trained(parameters: Iterator[Parameter]) -> list[Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


@contextmanager
def without_gradients(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Leave parameters out of the graph, so that a module's input alone gets a gradient."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
