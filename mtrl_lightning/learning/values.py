"""The meaning of a critic's outputs, and their loss.

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``Q`` critics, ``O`` outputs of a critic.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrl_lightning.checks import above, at_least, one_of
from mtrl_lightning.learning import losses


class Value(nn.Module):
    """The meaning of a critic's outputs; built by a factory ``() -> Value``."""

    out_dim: int
    """Outputs of a critic, ``O``."""

    def q(self, output_QRnO: Tensor) -> Tensor:
        """Return the values ``[Q', R, n]``; the smallest counts."""
        raise NotImplementedError

    def loss(
        self,
        output_QRnO: Tensor,
        next_output_QRnO: Tensor,
        reward_Rn: Tensor,
        terminated_Rn: Tensor,
        next_cost_Rn: Tensor,
        discount: float,
    ) -> Tensor:
        """Return each task's critic loss ``[R]``.

        Args:
            output_QRnO: of the critics, for the batch's actions.
            next_output_QRnO: of the target critics, for the policy's next actions; without a graph.
            reward_Rn: rewards.
            terminated_Rn: where nothing is bootstrapped.
            next_cost_Rn: cost of the policy's next actions: in SAC, the temperature times
                their log density.
            discount: gamma.
        """
        raise NotImplementedError


class Scalar(Value):
    """One output per critic, learned by squared error.

    Args:
        reduction: which value counts for targets and actor: ``min``, the smallest critic's (clipped
            double Q), or ``mean``, the critics' mean.
    """

    out_dim = 1

    def __init__(self, reduction: Literal["min", "mean"] = "min") -> None:
        super().__init__()
        one_of(("min", "mean"), reduction=reduction)
        self._reduction = reduction

    def q(self, output_QRnO: Tensor) -> Tensor:
        """Return the outputs ``[Q, R, n]``, or their mean ``[1, R, n]``."""
        q_QRn = output_QRnO.squeeze(-1)
        return q_QRn if self._reduction == "min" else q_QRn.mean(0, keepdim=True)

    def loss(
        self,
        output_QRnO: Tensor,
        next_output_QRnO: Tensor,
        reward_Rn: Tensor,
        terminated_Rn: Tensor,
        next_cost_Rn: Tensor,
        discount: float,
    ) -> Tensor:
        """Return ``sum_i mean (Q_i - y)^2``."""
        next_q_QRn = self.q(next_output_QRnO)
        target_Rn = losses.critic_target(
            reward_Rn, terminated_Rn, next_q_QRn, next_cost_Rn, discount
        )
        return losses.critic_loss(output_QRnO.squeeze(-1), target_Rn)


class Categorical(Value):
    """A distribution over equally spaced values, learned by cross-entropy.

    Bellemare et al. 2017 (C51); with the mean over the critics' distributions in place of the
    smallest value, as in BRC (Nauman et al. 2025, arXiv 2505.23150). Rewards have to be scaled so
    that values fit between the bounds.

    Args:
        num_bins: number of values, ``O``; 101 in BRC.
        bound: the values lie between ``-bound`` and ``bound``; 10 in BRC.
    """

    bin_O: Tensor

    def __init__(self, num_bins: int = 101, bound: float = 10.0) -> None:
        super().__init__()
        at_least(2, num_bins=num_bins)
        above(0, bound=bound)
        self.out_dim = num_bins
        self._bound = bound
        self.register_buffer("bin_O", torch.linspace(-bound, bound, num_bins), persistent=False)

    def q(self, output_QRnO: Tensor) -> Tensor:
        """Return the expected value under the critics' mean distribution, ``[1, R, n]``."""
        # multiplied and added, because a matrix product would be rounded to bf16
        q_QRn = (output_QRnO.softmax(-1) * self.bin_O).sum(-1)
        return q_QRn.mean(0, keepdim=True)

    def loss(
        self,
        output_QRnO: Tensor,
        next_output_QRnO: Tensor,
        reward_Rn: Tensor,
        terminated_Rn: Tensor,
        next_cost_Rn: Tensor,
        discount: float,
    ) -> Tensor:
        """Return ``sum_i mean -sum_k p_k log q_ik``.

        ``p`` is the projection of ``r + discount (z - c)`` with the cost ``c`` of the next action.
        """
        next_RnO = next_output_QRnO.softmax(-1).mean(0)
        bootstrap_RnO = discount * (self.bin_O - next_cost_Rn[..., None])
        target_RnO = reward_Rn[..., None] + torch.where(
            terminated_Rn[..., None], 0.0, bootstrap_RnO
        )
        projected_RnO = self.project(next_RnO, target_RnO)
        loss_QRn = -(projected_RnO * F.log_softmax(output_QRnO, -1)).sum(-1)
        return loss_QRn.sum(0).mean(1)

    def project(self, probability_RnO: Tensor, value_RnO: Tensor) -> Tensor:
        """Spread the probability of every value over its two neighbouring bins, ``[R, n, O]``.

        A bin gets ``max(0, 1 - distance)`` of it, with distances in widths of a bin; values beyond
        the bounds count as the bounds.
        """
        width = 2 * self._bound / (self.out_dim - 1)
        value_RnO = value_RnO.clamp(-self._bound, self._bound)
        # the clamp of the integers keeps a value that is not finite from being an index
        lower_RnO = ((value_RnO + self._bound) / width).long().clamp(0, self.out_dim - 2)
        projected_RnO = torch.zeros_like(probability_RnO)
        for neighbour_RnO in (lower_RnO, lower_RnO + 1):
            share_RnO = 1 - (value_RnO - self.bin_O[neighbour_RnO]).abs() / width
            _add_at(projected_RnO, neighbour_RnO, probability_RnO * share_RnO.clamp(min=0))
        return projected_RnO


def _add_at(sum_RnO: Tensor, index_RnO: Tensor, value_RnO: Tensor) -> None:
    """Add values at indices of their rows, in place and in the same order each time.

    ``scatter_add_`` has one order on a CPU only. On a GPU ``index_put_`` sorts the indices, except
    in compiled code.
    """
    if sum_RnO.device.type != "cpu":
        task_R11 = torch.arange(sum_RnO.shape[0], device=sum_RnO.device)[:, None, None]
        row_n1 = torch.arange(sum_RnO.shape[1], device=sum_RnO.device)[:, None]
        sum_RnO.index_put_((task_R11, row_n1, index_RnO), value_RnO, accumulate=True)
    else:
        sum_RnO.scatter_add_(-1, index_RnO, value_RnO)
