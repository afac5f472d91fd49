"""The squashed Gaussian policy.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications", appendix C.

Shapes: ``B`` batch, ``A`` action.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SquashedGaussian(NamedTuple):
    """A Gaussian distribution squashed by tanh: actions lie between -1 and 1."""

    mean_BA: Tensor
    log_std_BA: Tensor

    @classmethod
    def from_network(
        cls, output_BA2: Tensor, log_std_min: float, log_std_max: float
    ) -> SquashedGaussian:
        """Split a network's output ``[B, 2A]`` into mean and clamped log std, in float32."""
        mean_BA, log_std_BA = output_BA2.float().chunk(2, dim=-1)
        return cls(mean_BA, log_std_BA.clamp(log_std_min, log_std_max))

    def mode(self) -> Tensor:
        """Return the deterministic action ``[B, A]``, tanh of the mean."""
        return self.mean_BA.tanh()

    def sample(self, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions ``[B, A]`` and log densities ``[B]`` for standard normal noise ``[B, A]``.

        ``log pi(a) = sum_A [log N(u; mean, std) - log(1 - tanh(u)^2)]`` with ``a = tanh(u)``, where
        ``log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u))`` does not underflow for large ``|u|``.
        """
        u_BA = self.mean_BA + self.log_std_BA.exp() * noise_BA
        normal_BA = -0.5 * noise_BA.square() - self.log_std_BA - 0.5 * math.log(2 * math.pi)
        squash_BA = 2 * (math.log(2) - u_BA - F.softplus(-2 * u_BA))
        return torch.tanh(u_BA), (normal_BA - squash_BA).sum(-1)
