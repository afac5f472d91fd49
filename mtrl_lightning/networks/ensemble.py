"""Several networks of one architecture, such as twin critics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.networks.network import Network


class Ensemble(nn.Module):
    """``Q`` networks on the same input.

    Args:
        make: builds one network.
        size: number of networks, ``Q``.
    """

    def __init__(self, make: Callable[[], Network], size: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(make() for _ in range(size))

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, D]`` and ``[B]`` to ``[Q, B, out_dim]``."""
        return torch.stack([member(x_BD, task_B) for member in self.members])

    def shared_parameters(self) -> Iterator[Parameter]:
        """Yield the parameters that several tasks use."""
        for member in self.members:
            yield from member.shared_parameters()  # type: ignore[operator]

    def last_shared_weights(self) -> list[Parameter]:
        """Return the weights of each network's last shared layer."""
        return [member.last_shared_weight() for member in self.members]  # type: ignore[operator]

    def mask_losses(self, loss_T: Tensor) -> Tensor:
        """Return the tasks' losses ``[T]``, with 0 for a task that one of the networks must not learn from now."""
        for member in self.members:
            loss_T = member.mask_losses(loss_T)  # type: ignore[operator]
        return loss_T

    def after_step(self, loss_T: Tensor, task_T: Tensor, generator: torch.Generator) -> None:
        """Let every network repair what a step of the optimizer cannot."""
        for member in self.members:
            member.after_step(loss_T, task_T, generator)  # type: ignore[operator]
