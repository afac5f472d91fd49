"""Slowly moving copies of networks."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def frozen_copy(module: M) -> M:
    """Return a copy whose parameters get no gradient."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def assign_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give the target the source's parameters."""
    for parameter, value in zip(target.parameters(), source.parameters(), strict=True):
        parameter.copy_(value)


@torch.no_grad()
def polyak_update(source: nn.Module, target: nn.Module, tau: float) -> None:
    """Move the target's parameters towards the source's, ``t <- t + tau (s - t)``, and copy the buffers."""
    sources: list[Tensor] = list(source.parameters())
    targets: list[Tensor] = list(target.parameters())
    assert len(sources) == len(targets)
    if targets:
        torch._foreach_lerp_(targets, sources, tau)
    for buffer, copied in zip(source.buffers(), target.buffers(), strict=True):
        copied.copy_(buffer)
