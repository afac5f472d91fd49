"""Soft modularization (Yang et al. 2020, "Multi-Task Reinforcement Learning with Soft Modularization").

Shapes: ``B`` batch, ``E`` embedding, ``M`` modules a layer (given ``i``, taken ``j``), ``H``
features of a module.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning
from mtrl_lightning.networks.experts import Experts, require_at_least_one
from mtrl_lightning.networks.network import Network, he_linear, uniform_

ROUTING_BOUND = 3e-3
"""The routing's last layers start uniform within this bound, as in the authors' program: nearly even routing."""


class SoftModularization(Network):
    """``L`` layers of ``M`` modules; observation and task decide how much each module takes of each one before it.

    With ``z = f(x) * h(task)``, equations 2 to 5 of the paper:

    - ``p^1 = W^1 relu(z)`` and ``p^(l+1) = W^(l+1) relu(W_u^l p^l * z)``, softmax over a module's
      inputs ``j``;
    - ``g_i^1 = relu(f(x))`` and ``g_i^(l+1) = sum_j softmax(p^l)_ij relu(W_j^l g_j^l)``.

    The paper adds the last layer's modules up. Its authors' program weights them by a last routing
    of ``M`` numbers, without which ``p^L`` would be used by nothing; this is done here.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        width: features of a module, ``d``; 256 in the paper.
        depth: layers of modules, ``L``; 2 for MT10, 4 for MT50.
        num_modules: modules of a layer, ``n`` in the paper; 2 for MT10, 4 for MT50.
        embedding_dim: features of ``f`` and ``h``, ``D``; 400 in the paper. ``f`` has two layers of
            them.
        output_bound: the output layer starts uniform within this bound (0 for 1 / sqrt(width)).
        conditioning: what ``h`` is linear in; None for the algorithm's
            ``conditioning``, or else the one-hot.

    Raises:
        ConfigurationError: if there would be no layer, module or feature.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        num_tasks: int,
        *,
        width: int = 256,
        depth: int = 2,
        num_modules: int = 2,
        embedding_dim: int = 400,
        output_bound: float = 3e-3,
        conditioning: Callable[[int], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        require_at_least_one(
            width=width, depth=depth, num_modules=num_modules, embedding_dim=embedding_dim
        )
        self.conditioning = (conditioning or OneHot)(num_tasks)
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
        self.head = nn.Linear(width, out_dim)
        uniform_(self.head.weight, output_bound, width)
        uniform_(self.head.bias, output_bound, width)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        f_BE = self.encoder(x_BD)
        g = f_BE.relu()
        for layer, p_BMM in zip(self.layers, self.route(f_BE, task_B), strict=True):
            g = torch.einsum("bij,jbh->ibh", p_BMM, layer(g))
        return self.head(g[0])  # type: ignore[no-any-return]

    def route(self, f_BE: Tensor, task_B: Tensor) -> list[Tensor]:
        """Return how much of each module's output goes where: ``[B, M, M]`` a layer, ``[B, 1, M]`` after the last."""
        z_BE = f_BE * self.task_encoder(self.conditioning(task_B))
        p_BP = self.routing[0](z_BE.relu())
        routes = [p_BP]
        for into, out in zip(self.routing_inputs, list(self.routing)[1:], strict=True):
            p_BP = out((into(p_BP) * z_BE).relu())
            routes.append(p_BP)
        num_modules = routes[-1].shape[-1]
        return [p_BP.unflatten(-1, (-1, num_modules)).softmax(-1) for p_BP in routes]
