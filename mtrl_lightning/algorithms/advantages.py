"""Advantages and losses of proximal policy optimization, as pure functions.

Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation"
(arXiv 1506.02438), and 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), with one
loss per task.

Shapes: ``S`` steps of an iteration, ``E`` environments, ``T`` tasks, ``R`` trained tasks, ``n``
rows of a task.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

EPSILON = 1e-8
"""Keeps divisors above 0: deviations of advantages, variances of returns, sums of norms."""


def episode_cuts(terminated_SE: Tensor, truncated_SE: Tensor, valid_SE: Tensor) -> Tensor:
    """Return where a transition is not followed by the next row of its environment, ``[S, E]``.

    That is at an episode's end, before a transition that never happened because the environment was
    rebuilt, and at the last step.
    """
    next_valid_SE = torch.cat([valid_SE[1:], torch.zeros_like(valid_SE[:1])])
    return terminated_SE | truncated_SE | ~next_valid_SE


def generalized_advantages(
    reward_SE: Tensor,
    value_SE: Tensor,
    next_value_SE: Tensor,
    terminated_SE: Tensor,
    cut_SE: Tensor,
    discount: float,
    gae_lambda: float,
) -> Tensor:
    """Return the advantages ``[S, E]``, equation 16 of Schulman et al. 2016.

    ``delta_t = r_t + discount (1 - terminated_t) V(s'_t) - V(s_t)`` and
    ``A_t = delta_t + discount gae_lambda (1 - cut_t) A_(t+1)``.

    Args:
        reward_SE: rewards.
        value_SE: values of the observations.
        next_value_SE: values of the true successors, also at an episode's end.
        terminated_SE: where the task terminated, so that the target does not bootstrap.
        cut_SE: where the next row is not the successor; see ``episode_cuts``.
        discount: gamma.
        gae_lambda: lambda.
    """
    bootstrap_SE = torch.where(terminated_SE, 0.0, next_value_SE)
    delta_SE = reward_SE + discount * bootstrap_SE - value_SE
    decay_SE = discount * gae_lambda * (~cut_SE).to(delta_SE)
    advantage_SE = torch.empty_like(delta_SE)
    advantage_E = torch.zeros_like(delta_SE[0])
    for step in reversed(range(len(delta_SE))):
        advantage_E = delta_SE[step] + decay_SE[step] * advantage_E
        advantage_SE[step] = advantage_E
    return advantage_SE


def task_moments(
    value_SE: Tensor, task_E: Tensor, valid_SE: Tensor, num_tasks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each task's mean, variance and number of valid values, ``[T]``; zeros if none."""
    weight_SE = valid_SE.to(value_SE)
    count_T = _task_sums(weight_SE, task_E, num_tasks)
    divisor_T = count_T.clamp(min=1)
    mean_T = _task_sums(weight_SE * value_SE, task_E, num_tasks) / divisor_T
    deviation_SE = weight_SE * (value_SE - mean_T[task_E])
    variance_T = _task_sums(deviation_SE.square(), task_E, num_tasks) / divisor_T
    return mean_T, variance_T, count_T


def _task_sums(value_SE: Tensor, task_E: Tensor, num_tasks: int) -> Tensor:
    total_T = value_SE.new_zeros(num_tasks)
    return total_T.index_add_(0, task_E, value_SE.sum(0))


def surrogate_loss(log_ratio_Rn: Tensor, advantage_Rn: Tensor, clip: float) -> Tensor:
    """Return each row's clipped surrogate (equation 7 of Schulman et al. 2017), negated.

    ``-min(ratio A, clamp(ratio, 1 - clip, 1 + clip) A)`` with ``ratio = pi / pi_old``. For either
    sign of ``A`` that is ``max(ratio (-A), -A - clip |A|)``.
    """
    cost_Rn = -advantage_Rn
    bound_Rn = torch.sub(cost_Rn, advantage_Rn.abs(), alpha=clip)
    loss_Rn: Tensor = _SurrogateLoss.apply(log_ratio_Rn, cost_Rn, bound_Rn)
    return loss_Rn


def task_weights(valid_SE: Tensor, num_trained: int) -> Tensor:
    """Return the weight ``m / max m`` of each task's losses, with ``m`` its valid environments.

    ``n`` rows sampled uniformly have the expected loss ``E[L] = sum_i L_i / (S m)``, so ``m E[L]``
    is proportional to the sum over the task's rows: all rows of all tasks have the same weight.

    Args:
        valid_SE: where there are transitions; environments in the order of the tasks.
        num_trained: number of trained tasks, ``R``.
    """
    stepped_R = valid_SE.any(0).view(num_trained, -1).sum(1)
    return stepped_R / stepped_R.max()


def weighted_mean(value_Rn: Tensor, weight_Rn: Tensor) -> Tensor:
    """Return the weighted mean of all rows."""
    return (weight_Rn * value_Rn).mean() / weight_Rn.mean()


def kl_and_clip_fraction(
    log_ratio_Rn: Tensor, clip: float, weight_Rn: Tensor
) -> tuple[Tensor, Tensor]:
    """Return an estimate of ``KL(pi_old || pi)``, and the fraction of clipped rows, weighted.

    The estimate ``mean (ratio - 1) - log ratio`` (Schulman 2020, "Approximating KL Divergence", k3)
    uses independent samples of ``pi_old`` and is never negative. Rows count as clipped if their
    ratio is below ``1 - clip`` or above ``1 + clip``.
    """
    excess_Rn = log_ratio_Rn.expm1()
    kl = weighted_mean(excess_Rn - log_ratio_Rn, weight_Rn)
    return kl, weighted_mean(excess_Rn.abs().gt_(clip), weight_Rn)


class _SurrogateLoss(torch.autograd.Function):
    """``max(ratio c, bound)``; gradient w.r.t. ``log ratio``: ``ratio c``, or 0 at the bound."""

    @staticmethod
    def forward(ctx: Any, log_ratio_Rn: Tensor, cost_Rn: Tensor, bound_Rn: Tensor) -> Tensor:
        loss_Rn = log_ratio_Rn.exp() * cost_Rn
        ctx.save_for_backward(loss_Rn.masked_fill(loss_Rn < bound_Rn, 0.0))
        return torch.maximum(loss_Rn, bound_Rn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_Rn: Tensor) -> tuple[Tensor, None, None]:
        (slope_Rn,) = ctx.saved_tensors
        return gradient_Rn * slope_Rn, None, None
