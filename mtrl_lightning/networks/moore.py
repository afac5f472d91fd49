"""Orthogonal experts (Hendawy et al. 2024, "Multi-Task Reinforcement Learning with Mixture of Orthogonal Experts").

Shapes: ``B`` batch, ``K`` experts, ``H`` features of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning, must_tell
from mtrl_lightning.networks.experts import Experts, require_at_least_one
from mtrl_lightning.networks.multi_head import LinearHeads
from mtrl_lightning.networks.network import Network

EPSILON = 1e-12
"""Added to squared norms that are divided by: what is left of a vector below its root counts as nothing."""


class MOORE(Network):
    """Experts' features made orthonormal, mixed by the task: ``y = head_tau(tanh(sum_k w_tau,k v_k(x)))``.

    The task is not part of the experts' input. An expert's last layer has no activation of its own,
    and tanh follows the mixture, as in the authors' program for MetaWorld. ``w`` is linear in what
    tells the task, without bias: with the one-hot, a learned table.

    Args:
        in_dim: features that come in.
        out_dim: numbers that come out.
        num_tasks: number of tasks, ``T``.
        width: features of an expert's layer; 400 in the paper.
        depth: layers of an expert; 3 in the paper.
        num_experts: number of experts, ``k`` in the paper; 4 for MT10, 6 for MT50; at most
            ``width``.
        output_bound: the output layers start uniform within this bound (0 for 1 / sqrt(width)).
        conditioning: what ``w`` is linear in; None for the algorithm's
            ``conditioning``, or else the one-hot.

    Raises:
        ConfigurationError: if there would be no layer, expert or feature, more experts than
            features, or nothing that tells the task.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        num_tasks: int,
        *,
        width: int = 400,
        depth: int = 3,
        num_experts: int = 4,
        output_bound: float = 3e-3,
        conditioning: Callable[[int], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        require_at_least_one(width=width, depth=depth, num_experts=num_experts)
        if num_experts > width:
            raise ConfigurationError(
                f"num_experts is {num_experts} and width {width}: more vectors than features are"
                " never orthogonal, "
                "set num_experts to at most width"
            )
        self.conditioning = must_tell((conditioning or OneHot)(num_tasks), "MOORE")
        self.mixture = nn.Linear(self.conditioning.out_dim, num_experts, bias=False)
        nn.init.xavier_uniform_(self.mixture.weight)
        self.experts = Experts(num_experts, in_dim, width, width=width, depth=depth - 1)
        self.heads = LinearHeads(width, out_dim, num_tasks, output_bound)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map ``[B, in_dim]`` and ``[B]`` to ``[B, out_dim]``."""
        basis_KBH = orthonormal(self.experts(x_BD))
        w_BK = self.mixture(self.conditioning(task_B))
        features_BH = torch.einsum("bk,kbh->bh", w_BK, basis_KBH).tanh()
        return self.heads(features_BH, task_B)  # type: ignore[no-any-return]

    def shared_parameters(self) -> Iterator[Parameter]:
        """Yield the experts' parameters, and what ``w`` is computed by unless it is a table: its rows are tasks'."""
        if not isinstance(self.conditioning, OneHot):
            yield from self.conditioning.parameters()
            yield from self.mixture.parameters()
        yield from self.experts.parameters()

    def last_shared_weight(self) -> Parameter:
        """Return the experts' last weights ``[K, width, width]``."""
        return self.experts.weights[-1]


def orthonormal(u_KBH: Tensor) -> Tensor:
    """Make each sample's ``K`` vectors orthonormal by Gram-Schmidt, ``[K, B, H]``, in float32 or better.

    ``v_k = u_k - sum_(j<k) <u_k, v_j> v_j``, divided by its norm; what is left is projected again
    for each ``j`` in turn, which is the same on paper and loses fewer digits. A vector of zeros
    stays one and has a finite gradient; where less than about 1e-6 is left of a vector, it comes
    out shorter.
    """
    basis: list[Tensor] = []
    for u_BH in u_KBH.to(torch.promote_types(u_KBH.dtype, torch.float32)).unbind(0):
        rest_BH = u_BH
        for v_BH in basis:
            rest_BH = rest_BH - (rest_BH * v_BH).sum(-1, keepdim=True) * v_BH
        basis.append(rest_BH * (rest_BH.square().sum(-1, keepdim=True) + EPSILON).rsqrt())
    return torch.stack(basis)
