"""Several networks of one architecture, such as twin critics.

Shapes: ``Q`` members (critics), ``B`` batch, ``D`` input features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mtrl_lightning.networks.network import Network


class Ensemble(nn.Module):
    """Apply ``Q`` networks of one architecture to the same input.

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
