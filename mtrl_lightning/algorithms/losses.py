"""Losses of the off-policy algorithms, multi-task soft actor-critic and TD3.

The functions compute targets and losses. A ``Value`` maps a critic's outputs, a scalar or a
categorical distribution over values, to Q values and computes the critic loss.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), with one
loss per task as in Yu et al. 2019 (MetaWorld). Equation numbers refer to the former unless stated.

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``A`` action, ``Q`` critics, ``O`` outputs of a
critic.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrl_lightning.checks import above, at_least, one_of
from mtrl_lightning.transitions import TransitionBatch


def critic_target(
    reward_Rn: Tensor,
    terminated_Rn: Tensor,
    next_q_QRn: Tensor,
    next_cost_Rn: Tensor,
    discount: float,
) -> Tensor:
    """Return the critics' targets ``[R, n]``, equation 3.

    ``y = r + discount (1 - terminated) [min_i Q_i' - c']`` with the cost ``c' = alpha log pi'``.
    A truncated transition is not terminated: it bootstraps from its true successor.
    """
    value_Rn = next_q_QRn.amin(0) - next_cost_Rn
    return reward_Rn + discount * value_Rn.masked_fill(terminated_Rn, 0.0)


def critic_loss(q_QRn: Tensor, target_Rn: Tensor) -> Tensor:
    """Return each task's ``L_Q = sum_i mean (Q_i - y)^2`` (equation 5 without 1/2), ``[R]``."""
    error_QRn = F.mse_loss(q_QRn, target_Rn.expand_as(q_QRn), reduction="none")
    return error_QRn.sum(0).mean(1)


def actor_loss(cost_Rn: Tensor, q_QRn: Tensor) -> Tensor:
    """Return each task's ``L_pi = mean (c - min_i Q_i)``, ``[R]``.

    Equation 7, with the cost ``c = alpha log pi``.
    """
    # on a GPU, the backward of min launches fewer kernels than that of amin
    smallest_Rn = q_QRn.min(0).values
    return (cost_Rn - smallest_Rn).mean(1)


def deterministic_actor_loss(q_Rn: Tensor) -> Tensor:
    """Return each task's ``L_pi = mean -Q_1(s, pi(s))``, ``[R]``.

    Its gradient is that of algorithm 1 in Fujimoto et al. 2018, "Addressing Function Approximation
    Error in Actor-Critic Methods" (arXiv 1802.09477), through the first critic only.
    """
    return (-q_Rn).mean(1)


def smoothed_action(action_RnA: Tensor, noise_RnA: Tensor, std: float, clip: float) -> Tensor:
    """Return ``clip(pi'(s') + clip(std eps, -c, c), -1, 1)``, ``[R, n, A]``.

    Target policy smoothing, algorithm 1 in Fujimoto et al. 2018 (arXiv 1802.09477).

    Args:
        action_RnA: the target policy's actions ``pi'(s')``.
        noise_RnA: standard normal noise ``eps``.
        std: standard deviation of the smoothing, ``sigma`` in the paper.
        clip: largest magnitude of the smoothing, ``c`` in the paper.
    """
    return (action_RnA + (std * noise_RnA).clamp(-clip, clip)).clamp(-1, 1)


def temperature_loss(
    log_alpha_Rn: Tensor, log_prob_Rn: Tensor, target_entropy: Tensor | float
) -> Tensor:
    """Return each task's ``L_alpha = mean -log alpha (log pi + H)``, ``[R]``.

    Equation 18, in ``log alpha``. The target entropy ``H`` is a number, or one for each task
    ``[R, 1]``.
    """
    return (-log_alpha_Rn * (log_prob_Rn + target_entropy)).mean(1)


class CriticTarget(NamedTuple):
    """Inputs of the temporal-difference target, detached."""

    next_output_QRnO: Tensor
    """Outputs of the target critics for the policy's next actions."""
    next_cost_Rn: Tensor
    """Subtracted from the Q value: the entropy term ``alpha log pi(a'|s')`` in SAC, 0 in TD3."""


class Value(nn.Module):
    """Interpretation of the critics' outputs; built by a factory ``() -> Value``."""

    out_dim: int
    """Outputs of a critic, ``O``."""

    def q(self, output_QRnO: Tensor) -> Tensor:
        """Return the values ``[Q', R, n]``; losses use the minimum over the first dimension."""
        raise NotImplementedError

    def loss(
        self, output_QRnO: Tensor, target: CriticTarget, batch: TransitionBatch, discount: float
    ) -> Tensor:
        """Return each task's critic loss ``[R]``.

        Args:
            output_QRnO: the critics' outputs for the batch's actions.
            target: outputs and costs of the policy's next actions.
            batch: rewards, and where the target does not bootstrap.
            discount: gamma.
        """
        raise NotImplementedError


class Scalar(Value):
    """One output per critic, learned by squared error.

    Args:
        reduction: value used in targets and the actor loss: ``min``, the critics' minimum (clipped
            double Q), or ``mean``, their mean.
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
        self, output_QRnO: Tensor, target: CriticTarget, batch: TransitionBatch, discount: float
    ) -> Tensor:
        """Return ``sum_i mean (Q_i - y)^2``."""
        next_q_QRn = self.q(target.next_output_QRnO)
        target_Rn = critic_target(
            batch.reward_Rn, batch.terminated_Rn, next_q_QRn, target.next_cost_Rn, discount
        )
        return critic_loss(output_QRnO.squeeze(-1), target_Rn)


class Categorical(Value):
    """A distribution over equally spaced values, learned by cross-entropy.

    Bellemare et al. 2017 (C51), with the mean of the critics' distributions instead of the
    minimum value, as in BRC (Nauman et al. 2025, arXiv 2505.23150). Scale rewards so that values
    lie within the bounds.

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
        # no matrix product, which autocast would round to bfloat16
        q_QRn = (output_QRnO.softmax(-1) * self.bin_O).sum(-1)
        return q_QRn.mean(0, keepdim=True)

    def loss(
        self, output_QRnO: Tensor, target: CriticTarget, batch: TransitionBatch, discount: float
    ) -> Tensor:
        """Return ``sum_i mean -sum_k p_k log q_ik``.

        ``p`` is the projection of ``r + discount (z - c)`` with the cost ``c`` of the next action.
        """
        next_RnO = target.next_output_QRnO.softmax(-1).mean(0)
        bootstrap_RnO = discount * (self.bin_O - target.next_cost_Rn[..., None])
        target_RnO = batch.reward_Rn[..., None] + torch.where(
            batch.terminated_Rn[..., None], 0.0, bootstrap_RnO
        )
        projected_RnO = self.project(next_RnO, target_RnO)
        loss_QRn = -(projected_RnO * F.log_softmax(output_QRnO, -1)).sum(-1)
        return loss_QRn.sum(0).mean(1)

    def project(self, probability_RnO: Tensor, value_RnO: Tensor) -> Tensor:
        """Split the probability of each value between its two neighbouring bins, ``[R, n, O]``.

        A bin gets the fraction ``max(0, 1 - distance)``, with the distance in bin widths; values
        are clamped to the bounds.
        """
        width = 2 * self._bound / (self.out_dim - 1)
        value_RnO = value_RnO.clamp(-self._bound, self._bound)
        # clamping the integers keeps non-finite values from becoming invalid indices
        lower_RnO = ((value_RnO + self._bound) / width).long().clamp(0, self.out_dim - 2)
        projected_RnO = torch.zeros_like(probability_RnO)
        for neighbour_RnO in (lower_RnO, lower_RnO + 1):
            share_RnO = 1 - (value_RnO - self.bin_O[neighbour_RnO]).abs() / width
            _add_at(projected_RnO, neighbour_RnO, probability_RnO * share_RnO.clamp(min=0))
        return projected_RnO


def _add_at(sum_RnO: Tensor, index_RnO: Tensor, value_RnO: Tensor) -> None:
    """Add values at indices of their rows, in place and deterministically.

    ``scatter_add_`` is deterministic only on a CPU. On a GPU, ``index_put_`` sorts the indices,
    except in compiled code.
    """
    if sum_RnO.device.type != "cpu":
        task_R11 = torch.arange(sum_RnO.shape[0], device=sum_RnO.device)[:, None, None]
        row_n1 = torch.arange(sum_RnO.shape[1], device=sum_RnO.device)[:, None]
        sum_RnO.index_put_((task_R11, row_n1, index_RnO), value_RnO, accumulate=True)
    else:
        sum_RnO.scatter_add_(-1, index_RnO, value_RnO)
