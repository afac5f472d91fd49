"""What a critic's outputs mean, and how they are learned.

Shapes: ``R`` trained tasks, ``B = R * n`` batch (task-major), ``Q`` critics, ``O`` outputs of a
critic.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrl_lightning.checks import above, at_least, one_of
from mtrl_lightning.learning import losses


class Value(nn.Module):
    """What a critic's outputs mean; built by a factory ``() -> Value``."""

    out_dim: int
    """Outputs of a critic, ``O``."""

    def q(self, output_QBO: Tensor) -> Tensor:
        """Return the values ``[Q', B]``, of which the smallest counts."""
        raise NotImplementedError

    def loss(
        self,
        output_QBO: Tensor,
        next_output_QBO: Tensor,
        reward_B: Tensor,
        terminated_B: Tensor,
        next_cost_B: Tensor,
        discount: float,
        num_tasks: int,
    ) -> Tensor:
        """Return each task's critic loss ``[R]``.

        Args:
            output_QBO: of the critics, for the batch's actions.
            next_output_QBO: of the target critics, for the policy's next actions; without a graph.
            reward_B: rewards.
            terminated_B: where nothing is bootstrapped.
            next_cost_B: what the policy pays for its next actions: in SAC, the temperature times
                their log density.
            discount: gamma.
            num_tasks: number of trained tasks, ``R``.
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

    def q(self, output_QBO: Tensor) -> Tensor:
        """Return the outputs ``[Q, B]``, or their mean ``[1, B]``."""
        q_QB = output_QBO.squeeze(-1)
        return q_QB if self._reduction == "min" else q_QB.mean(0, keepdim=True)

    def loss(
        self,
        output_QBO: Tensor,
        next_output_QBO: Tensor,
        reward_B: Tensor,
        terminated_B: Tensor,
        next_cost_B: Tensor,
        discount: float,
        num_tasks: int,
    ) -> Tensor:
        """Return ``sum_i mean (Q_i - y)^2``."""
        next_q_QB = self.q(next_output_QBO)
        target_B = losses.critic_target(reward_B, terminated_B, next_q_QB, next_cost_B, discount)
        return losses.critic_loss(output_QBO.squeeze(-1), target_B, num_tasks)


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

    def q(self, output_QBO: Tensor) -> Tensor:
        """Return the expected value under the critics' mean distribution, ``[1, B]``."""
        # multiplied and added, because a matrix product would be rounded to bf16
        q_QB = (output_QBO.softmax(-1) * self.bin_O).sum(-1)
        return q_QB.mean(0, keepdim=True)

    def loss(
        self,
        output_QBO: Tensor,
        next_output_QBO: Tensor,
        reward_B: Tensor,
        terminated_B: Tensor,
        next_cost_B: Tensor,
        discount: float,
        num_tasks: int,
    ) -> Tensor:
        """Return ``sum_i mean -sum_k p_k log q_ik``.

        ``p`` is the projection of ``r + discount (z - c)`` with the cost ``c`` of the next action.
        """
        next_BO = next_output_QBO.softmax(-1).mean(0)
        bootstrap_BO = discount * (self.bin_O - next_cost_B[:, None])
        target_BO = reward_B[:, None] + torch.where(terminated_B[:, None], 0.0, bootstrap_BO)
        wanted_BO = self.project(next_BO, target_BO)
        loss_QB = -(wanted_BO * F.log_softmax(output_QBO, -1)).sum(-1)
        return losses.per_task(loss_QB.sum(0), num_tasks)

    def project(self, probability_BO: Tensor, value_BO: Tensor) -> Tensor:
        """Spread the probability of every value over its two neighbouring bins, ``[B, O]``.

        A bin gets ``max(0, 1 - distance)`` of it, with distances in widths of a bin; values beyond
        the bounds count as the bounds.
        """
        width = 2 * self._bound / (self.out_dim - 1)
        value_BO = value_BO.clamp(-self._bound, self._bound)
        # the clamp of the integers keeps a value that is not finite from being an index
        lower_BO = ((value_BO + self._bound) / width).long().clamp(0, self.out_dim - 2)
        projected_BO = torch.zeros_like(probability_BO)
        for neighbour_BO in (lower_BO, lower_BO + 1):
            share_BO = 1 - (value_BO - self.bin_O[neighbour_BO]).abs() / width
            _add_at(projected_BO, neighbour_BO, probability_BO * share_BO.clamp(min=0))
        return projected_BO


def _add_at(sum_BO: Tensor, place_BO: Tensor, value_BO: Tensor) -> None:
    """Add values to places of their rows, in place and in the same order each time.

    ``scatter_add_`` has one order on a CPU only. On a GPU ``index_put_`` sorts the places, except
    in compiled code.
    """
    if sum_BO.is_cuda:
        row_B1 = torch.arange(len(sum_BO), device=sum_BO.device)[:, None]
        sum_BO.index_put_((row_B1, place_BO), value_BO, accumulate=True)
    else:
        sum_BO.scatter_add_(1, place_BO, value_BO)
