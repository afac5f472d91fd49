"""Feature-wise linear modulation (Perez et al. 2018, "FiLM: Visual Reasoning with a General Conditioning Layer").

Shapes: ``B`` batch, ``D`` input features, ``H`` hidden features, ``L`` layers, ``F`` factors a
layer (``H`` or 1).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning
from mtrl_lightning.networks.experts import require_at_least_one
from mtrl_lightning.networks.network import Network, he_linear, uniform_


class FiLM(Network):
    """Hidden layers ``relu(gamma (W x + b) + beta)``, whose ``gamma`` and ``beta`` are linear in what tells the task.

    The task is not part of the input. All ``gamma`` begin as 1 and all ``beta`` as 0: every task
    begins with the same network.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        width: features of a hidden layer; 400 in MetaWorld's protocols.
        depth: number of hidden layers; 3 in MetaWorld's protocols.
        scalar: whether a layer has one ``gamma`` and one ``beta`` for all features, as in mtrl.
        output_bound: the output layer starts uniform within this bound (0 for 1 / sqrt(width)).
        conditioning: what ``gamma`` and ``beta`` are computed from; None for the algorithm's
            ``conditioning``, or else the one-hot.

    Raises:
        ConfigurationError: if there would be no layer or no feature.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        num_tasks: int,
        *,
        width: int = 400,
        depth: int = 3,
        scalar: bool = False,
        output_bound: float = 3e-3,
        conditioning: Callable[[int], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        require_at_least_one(depth=depth, width=width)
        self.conditioning = (conditioning or OneHot)(num_tasks)
        self._split = (depth, 2, 1 if scalar else width)
        # a bias would be a second name for the layers' own weights and biases
        self.modulation = nn.Linear(
            self.conditioning.out_dim, depth * 2 * self._split[2], bias=False
        )
        nn.init.zeros_(self.modulation.weight)
        self.layers = nn.ModuleList(
            he_linear(in_dim if i == 0 else width, width) for i in range(depth)
        )
        self.head = nn.Linear(width, out_dim)
        uniform_(self.head.weight, output_bound, width)
        uniform_(self.head.bias, output_bound, width)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        modulation_BL2F = self.modulation(self.conditioning(task_B)).unflatten(-1, self._split)
        for layer, modulation_B2F in zip(self.layers, modulation_BL2F.unbind(1), strict=True):
            delta_BF, beta_BF = modulation_B2F.unbind(1)
            x_BD = ((1 + delta_BF) * layer(x_BD) + beta_BF).relu()
        return self.head(x_BD)  # type: ignore[no-any-return]
