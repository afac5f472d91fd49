"""The losses of multi-task soft actor-critic and TD3, as pure functions.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), with one
loss per task as in Yu et al. 2019 (MetaWorld). Equations are of this paper unless said otherwise.

Shapes: ``R`` trained tasks, ``n`` rows of a task, ``A`` action, ``Q`` critics.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


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
    # the gradient of min has fewer kernels on a GPU than that of amin
    smallest_Rn = q_QRn.min(0).values
    return (cost_Rn - smallest_Rn).mean(1)


def deterministic_actor_loss(q_Rn: Tensor) -> Tensor:
    """Return each task's ``L_pi = mean -Q_1(s, pi(s))``, ``[R]``.

    Its gradient is that of algorithm 1 in Fujimoto et al. 2018, "Addressing Function Approximation
    Error in Actor-Critic Methods" (arXiv 1802.09477): the first critic's alone.
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
