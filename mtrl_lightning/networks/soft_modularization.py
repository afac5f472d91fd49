"""Soft modularization: task-dependent routing of features through layers of modules.

Yang et al. 2020, "Multi-Task Reinforcement Learning with Soft Modularization".

Shapes: ``B`` batch, ``Z`` features of the embeddings, ``M`` modules per layer (``i`` receives from
``j``), ``P`` routing logits (``M * M``, in the last layer ``M``), ``H`` features of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning, require_task_input
from mtrl_lightning.networks.experts import Experts
from mtrl_lightning.networks.network import Network, TaskAxis, he_linear, output_linear, uniform_
from mtrl_lightning.spec import EnvSpec

ROUTING_BOUND = 3e-3
"""Bound of the uniform initial values of the routing's output layers, as in the authors' code.

The initial routing is nearly uniform.
"""


class SoftModularization(Network):
    """Route features through ``L`` layers of ``M`` modules depending on observation and task.

    With ``z = f(x) * h(task)``, equations 2 to 5 of the paper:

    - ``p^1 = W^1 relu(z)`` and ``p^(l+1) = W^(l+1) relu(W_u^l p^l * z)``, with a softmax over the
      inputs ``j`` of a module;
    - ``g_i^1 = relu(f(x))`` and ``g_i^(l+1) = sum_j softmax(p^l)_ij relu(W_j^l g_j^l)``.

    The paper sums the modules of the last layer. Here a final routing of ``M`` numbers weights
    them, as in the authors' code; otherwise ``p^L`` would be unused. The authors' code also differs
    from the paper, and from this class, as follows:

    - ReLU follows the mixing, ``relu(sum_j softmax(p^l)_ij W_j^l g_j^l)``, instead of each module;
    - the routing of a layer depends on the concatenated routings of all earlier layers, after the
      softmax, instead of only on the previous layer's logits ``p^l``;
    - two gating layers of 256 features between ``relu(z)`` and the routing replace ``z``.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        spec: the tasks.
        width: size of a module, ``d``; 256 in the paper.
        depth: number of layers of modules, ``L``; 2 for MT10, 4 for MT50.
        num_modules: modules per layer, ``M`` (``n`` in the paper); 2 for MT10, 4 for MT50.
        embedding_dim: size of ``f`` and ``h`` (``D`` in the paper; 400). ``f`` has two layers of
            this size.
        output_bound: bound of the uniform initial values of the output layer (0: 1 / sqrt(width)).
        conditioning: task conditioning, from which ``h`` is computed; None for the algorithm's
            ``conditioning``, by default the one-hot task ID.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        spec: EnvSpec,
        *,
        width: int = 256,
        depth: int = 2,
        num_modules: int = 2,
        embedding_dim: int = 400,
        output_bound: float = 3e-3,
        conditioning: Callable[[EnvSpec], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        at_least(1, width=width, depth=depth, num_modules=num_modules, embedding_dim=embedding_dim)
        self.conditioning = require_task_input((conditioning or OneHot)(spec), "SoftModularization")
        self.encoder = nn.Sequential(
            he_linear(in_dim, embedding_dim), nn.ReLU(), he_linear(embedding_dim, embedding_dim)
        )
        self.task_encoder = nn.Linear(self.conditioning.out_dim, embedding_dim)
        sizes = [num_modules**2] * (depth - 1) + [num_modules]
        self.routing = nn.ModuleList(nn.Linear(embedding_dim, size) for size in sizes)
        for parameter in self.routing.parameters():
            uniform_(parameter, ROUTING_BOUND, embedding_dim)
        self.routing_inputs = nn.ModuleList(nn.Linear(size, embedding_dim) for size in sizes[:-1])
        self.layers = nn.ModuleList(
            Experts(
                num_modules,
                embedding_dim if i == 0 else width,
                width,
                width=width,
                depth=0,
                relu_last=True,
            )
            for i in range(depth)
        )
        self.head = output_linear(width, out_dim, output_bound)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features and tasks to outputs: ``[B, out_dim]``, or ``[R, n, out_dim]``."""
        f_BZ = self.encoder(x_BD.flatten(0, -2))
        g = f_BZ.relu()
        for layer, p_BMM in zip(self.layers, self.route(f_BZ, task_B.flatten()), strict=True):
            g = torch.einsum("bij,jbh->ibh", p_BMM, layer(g))
        y_BO = self.head(g[0])
        return y_BO.view(*task_B.shape, y_BO.shape[-1])  # type: ignore[no-any-return]

    def route(self, f_BZ: Tensor, task_B: Tensor) -> list[Tensor]:
        """Return the softmax routing weights: ``[B, M, M]`` per layer, ``[B, 1, M]`` last."""
        z_BZ = f_BZ * self.task_encoder(self.conditioning(task_B))
        p_BP = self.routing[0](z_BZ.relu())
        logits = [p_BP]
        for into, out in zip(self.routing_inputs, list(self.routing)[1:], strict=True):
            p_BP = out((into(p_BP) * z_BZ).relu())
            logits.append(p_BP)
        num_modules = logits[-1].shape[-1]
        return [p_BP.unflatten(-1, (-1, num_modules)).softmax(-1) for p_BP in logits]

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the columns of ``h`` that multiply a one-hot task ID."""
        return self.conditioning.columns("task_encoder.weight")
