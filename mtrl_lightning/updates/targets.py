"""Copies of networks' weights: target networks, and weights for collection processes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def frozen_copy(module: M) -> M:
    """Return a copy whose parameters do not require gradients."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def assign_parameters(source: nn.Module, target: nn.Module) -> None:
    """Assign the source's parameters to the target."""
    for parameter, value in zip(target.parameters(), source.parameters(), strict=True):
        parameter.copy_(value)


class PolyakAverage:
    """Update target networks towards their sources, ``t <- t + tau (s - t)``.

    Persistent buffers are copied; other buffers are constants. Parameters and buffers are looked up
    only once, because a lookup costs as much as a step.

    Args:
        sources: the online networks.
        targets: their copies, of the same structure.
        tau: Polyak coefficient, above 0 and at most 1; one number for all targets, or one for each
            target.
    """

    def __init__(
        self,
        sources: Sequence[nn.Module],
        targets: Sequence[nn.Module],
        tau: float | Sequence[float],
    ) -> None:
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._moved: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        """The targets' and the sources' parameters by tau."""
        self._buffers: list[tuple[nn.Module, nn.Module, str]] = []
        taus = [tau] * len(sources) if isinstance(tau, (int, float)) else tau
        for source, target, own_tau in zip(sources, targets, taus, strict=True):
            self.add(source, target, own_tau)

    def add(self, source: nn.Module, target: nn.Module, tau: float) -> None:
        """Add a target and its source."""
        assert len(list(source.parameters())) == len(list(target.parameters()))
        self._sources += source.parameters()
        self._targets += target.parameters()
        moved, towards = self._moved.setdefault(tau, ([], []))
        moved += target.parameters()
        towards += source.parameters()
        persistent = source.state_dict().keys()
        self._buffers += [
            (source, target, name) for name, _ in source.named_buffers() if name in persistent
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Update the targets' parameters once, and copy the buffers."""
        for tau, (targets, sources) in self._moved.items():
            if targets:
                torch._foreach_lerp_(targets, sources, tau)
        self.copy_buffers()

    @torch.no_grad()
    def copy_buffers(self) -> None:
        """Set the targets' persistent buffers to their sources'."""
        for source, target, name in self._buffers:
            target.get_buffer(name).copy_(source.get_buffer(name))

    @torch.no_grad()
    def copy(self) -> None:
        """Set the targets' parameters and buffers to their sources'."""
        self.copy_buffers()
        for source, target in zip(self._sources, self._targets, strict=True):
            target.copy_(source)


def copied_weights(networks: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return copies of the states of networks on the CPU, by the networks' names."""
    states = {name: network.state_dict() for name, network in networks.items()}
    # an extra state may hold NumPy arrays, such as running statistics
    copied = copy.deepcopy(states)
    return apply_to_collection(copied, Tensor, lambda tensor: tensor.detach().cpu())
