"""MOORE: a mixture of orthogonal experts.

Hendawy et al. 2024, "Multi-Task Reinforcement Learning with Mixture of Orthogonal Experts".

Shapes: ``B`` batch, ``K`` experts, ``H`` features of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from mtrl_lightning.checks import at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.networks.conditioning import OneHot, TaskConditioning, require_task_input
from mtrl_lightning.networks.experts import Experts
from mtrl_lightning.networks.multi_head import LinearHeads
from mtrl_lightning.networks.network import Network, TaskAxis
from mtrl_lightning.spec import EnvSpec

EPSILON = 1e-12
"""Added to squared norms before dividing by them: norms below its square root count as 0."""


class MOORE(Network):
    """Mix orthonormal expert features with weights per task, with one head per task.

    The output is ``y = head_tau(tanh(sum_k w_tau,k v_k(x)))`` with orthonormal ``v_k``. The task is
    not part of the experts' input. The last layer of an expert has no activation, and tanh follows
    the mixture, as in the authors' MetaWorld code. ``w`` is linear in the task conditioning,
    without bias; for one-hot task IDs it is a learned table.

    Args:
        in_dim: number of input features.
        out_dim: number of outputs.
        spec: the tasks.
        width: size of an expert's layers; 400 in the paper.
        depth: number of layers of an expert; 3 in the paper.
        num_experts: number of experts, ``k`` in the paper; 4 for MT10, 6 for MT50; at most
            ``width``.
        output_bound: bound of the uniform initial values of the output layers (0: 1 / sqrt(width)).
        conditioning: task conditioning, from which ``w`` is computed; None for the algorithm's
            ``conditioning``, by default the one-hot task ID.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        spec: EnvSpec,
        *,
        width: int = 400,
        depth: int = 3,
        num_experts: int = 4,
        output_bound: float = 3e-3,
        conditioning: Callable[[EnvSpec], TaskConditioning] | None = None,
    ) -> None:
        super().__init__()
        at_least(1, width=width, depth=depth, num_experts=num_experts)
        if num_experts > width:
            raise ConfigurationError(
                f"num_experts is {num_experts} and width is {width}: set num_experts to at most"
                " width, because more vectors than features cannot be orthogonal"
            )
        self.conditioning = require_task_input((conditioning or OneHot)(spec), "MOORE")
        self.mixture = nn.Linear(self.conditioning.out_dim, num_experts, bias=False)
        nn.init.xavier_uniform_(self.mixture.weight)
        # the last of the depth layers is the output layer, without ReLU
        self.experts = Experts(num_experts, in_dim, width, width=width, depth=depth - 1)
        self.heads = LinearHeads(width, out_dim, spec.num_tasks, output_bound)

    def forward(self, x_BD: Tensor, task_B: Tensor) -> Tensor:
        """Map features and tasks to outputs: ``[B, out_dim]``, or ``[R, n, out_dim]``."""
        basis_KBH = orthonormal(self.experts(x_BD.flatten(0, -2)))
        w_BK = self.mixture(self.conditioning(task_B.flatten()))
        # tanh(sum_k w_tau,k v_k(x))
        features_BH = torch.einsum("bk,kbh->bh", w_BK, basis_KBH).tanh()
        features_BH = features_BH.view(*task_B.shape, features_BH.shape[-1])
        return self.heads(features_BH, task_B)  # type: ignore[no-any-return]

    @property
    def scale_outputs(self) -> Callable[[Tensor, Tensor], None]:
        """Scales the heads."""
        return self.heads.scale_outputs

    def task_axes(self) -> Mapping[str, TaskAxis]:
        """Return the columns of ``w`` that multiply a one-hot task ID."""
        return self.conditioning.columns("mixture.weight")


def orthonormal(u_KBH: Tensor) -> Tensor:
    """Make the ``K`` vectors of each sample orthonormal by Gram-Schmidt, ``[K, B, H]``.

    ``v_k = u_k - sum_(j<k) <u_k, v_j> v_j``, divided by its norm. The projections are subtracted
    successively from the remainder (modified Gram-Schmidt), which is mathematically equivalent and
    has smaller rounding errors. The dtype is float32 or float64. A zero vector stays zero and has a
    finite gradient. A vector whose remainder is shorter than about 1e-6 gets a norm below 1.
    """
    basis: list[Tensor] = []
    dtype = torch.promote_types(u_KBH.dtype, torch.float32)
    for u_BH in u_KBH.to(dtype).unbind(0):
        remainder_BH = u_BH
        for v_BH in basis:
            # u <- u - <u, v_j> v_j
            projection_B1 = (remainder_BH * v_BH).sum(-1, keepdim=True)
            remainder_BH = remainder_BH - projection_B1 * v_BH
        # v_k = u / ||u||, with a finite gradient where u is 0
        squared_norm_B1 = remainder_BH.square().sum(-1, keepdim=True)
        basis.append(remainder_BH * (squared_norm_B1 + EPSILON).rsqrt())
    return torch.stack(basis)
