"""FiLM: feature-wise linear modulation.

Perez et al. 2018, "FiLM: Visual Reasoning with a General Conditioning Layer".

Shapes: ``B`` rows of any tasks ``[B]`` or of a training batch ``[R, n]``, ``D`` input features,
``H`` hidden features, ``L`` layers, ``F`` factors per layer (``H`` or 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning, require_task_input
from mtrl_lightning.networks.network import Network, TaskAxis, he_linear, output_linear
from mtrl_lightning.spec import EnvSpec


class FiLM(Network):
    """Scale and shift hidden features depending on the task: ``relu(gamma * (W x + b) + beta)``.

    ``gamma`` and ``beta`` are linear in the task conditioning; the task is not part of the input.
    ``gamma`` is initialized to 1 and ``beta`` to 0, so that all tasks start with the same network.
    The output layer is not modulated.

    With ``scalar``, each layer has a single ``gamma`` and ``beta`` as in mtrl (Sodhani et al.
    2021). In other respects mtrl's FiLM differs: it computes ``gamma * relu(W x + b) + beta``, also
    modulates the output layer, uses a task encoder's output as ``gamma`` and ``beta`` directly, and
    is an encoder (two hidden layers of 50) in front of actor and critic.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        spec: the tasks.
        width: size of a hidden layer; 400 in MetaWorld's protocols.
        depth: number of hidden layers; 3 in MetaWorld's protocols.
        scalar: whether each layer has one ``gamma`` and one ``beta`` for all its features.
        output_bound: bound of the uniform initial values of the output layer (0: 1 / sqrt(width)).
        conditioning: task conditioning, from which ``gamma`` and ``beta`` are computed; None for
            the algorithm's ``conditioning``, by default the one-hot task ID.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        spec: EnvSpec,
        *,
        width: int = 400,
        depth: int = 3,
        scalar: bool = False,
        output_bound: float = 3e-3,
        conditioning: Callable[[EnvSpec], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        at_least(1, depth=depth, width=width)
        self.conditioning = require_task_input((conditioning or OneHot)(spec), "FiLM")
        num_factors = 1 if scalar else width
        self._split = (depth, 2, num_factors)
        # no bias: it would be redundant with the layers' own weights and biases
        self.modulation = nn.Linear(self.conditioning.out_dim, depth * 2 * num_factors, bias=False)
        nn.init.zeros_(self.modulation.weight)
        self.layers = nn.ModuleList(
            he_linear(in_dim if i == 0 else width, width) for i in range(depth)
        )
        self.head = output_linear(width, out_dim, output_bound)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        modulation_BL2F = self.modulation(self.conditioning(task_B)).unflatten(-1, self._split)
        for layer, modulation_B2F in zip(self.layers, modulation_BL2F.unbind(-3), strict=True):
            delta_BF, beta_BF = modulation_B2F.unbind(-2)
            x_BD = ((1 + delta_BF) * layer(x_BD) + beta_BF).relu()
        return self.head(x_BD)  # type: ignore[no-any-return]

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the columns of ``gamma`` and ``beta`` that multiply a one-hot task ID."""
        return self.conditioning.columns("modulation.weight")
