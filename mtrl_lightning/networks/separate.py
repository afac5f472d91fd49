"""One network per task, without shared parameters."""

from __future__ import annotations

from torch import Tensor

from mtrl_lightning.checks import at_least
from mtrl_lightning.networks.experts import TaskExperts
from mtrl_lightning.networks.network import Network
from mtrl_lightning.spec import EnvSpec


class Separate(Network):
    """Train one MLP per task, without task input.

    Corresponds to "one SAC agent per task" in mtrl's tables (Sodhani et al. 2021), the baseline for
    networks that share parameters.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        spec: the tasks.
        width: size of a hidden layer; 400 in MetaWorld's protocols.
        depth: number of hidden layers; 3 in MetaWorld's protocols.
        output_bound: bound of the uniform initial values of the output layers (0: 1 / sqrt(width)).
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        spec: EnvSpec,
        *,
        width: int = 400,
        depth: int = 3,
        output_bound: float = 3e-3,
    ) -> None:
        super().__init__()
        at_least(1, depth=depth)
        self.own = TaskExperts(
            spec.num_tasks, in_dim, out_dim, width=width, depth=depth, output_bound=output_bound
        )

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        return self.own(x_BD, task_B)  # type: ignore[no-any-return]
