"""What every architecture is.

Shapes: ``B`` batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import Parameter


class Network(nn.Module):
    """Features and a task in, numbers out; built by a factory ``(in_dim, out_dim, num_tasks) -> Network``."""

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features ``[B, in_dim]`` and tasks ``[B]`` (integers) to ``[B, out_dim]``."""
        raise NotImplementedError

    def shared_parameters(self) -> Iterator[Parameter]:
        """Yield the parameters that several tasks use; a gradient method works on these."""
        return self.parameters()


def uniform_(parameter: Tensor, bound: float, fan_in: int) -> None:
    """Fill an output layer's parameter uniformly within ``bound``, or PyTorch's ``1 / sqrt(fan_in)`` if it is 0."""
    bound = bound or 1 / math.sqrt(fan_in)
    nn.init.uniform_(parameter, -bound, bound)
