"""The losses of multi-task soft actor-critic and TD3, as pure functions.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905), with one
loss per task as in Yu et al. 2019 (MetaWorld). Equations are of this paper unless said otherwise.

Shapes: ``R`` trained tasks, ``B = R * n`` batch (task-major), ``Q`` critics.
"""

from __future__ import annotations

import torch
from torch import Tensor


def per_task(loss_B: Tensor, num_tasks: int) -> Tensor:
    """Return each task's mean ``[R]`` of a task-major batch ``[B]``."""
    return loss_B.view(num_tasks, -1).mean(1)


def critic_target(
    reward_B: Tensor,
    terminated_B: Tensor,
    next_q_QB: Tensor,
    next_cost_B: Tensor,
    discount: float,
) -> Tensor:
    """Return the critics' targets ``[B]``, equation 3.

    ``y = r + discount (1 - terminated) [min_i Q_i' - c']`` with the cost ``c' = alpha log pi'``.
    A truncated transition is not terminated: it bootstraps from its true successor.
    """
    value_B = next_q_QB.amin(0) - next_cost_B
    return reward_B + discount * torch.where(terminated_B, 0.0, value_B)


def critic_loss(q_QB: Tensor, target_B: Tensor, num_tasks: int) -> Tensor:
    """Return each task's ``L_Q = sum_i mean (Q_i - y)^2`` (equation 5 without 1/2), ``[R]``."""
    return per_task((q_QB - target_B).square().sum(0), num_tasks)


def actor_loss(cost_B: Tensor, q_QB: Tensor, num_tasks: int) -> Tensor:
    """Return each task's ``L_pi = mean (c - min_i Q_i)``, ``[R]``.

    Equation 7, with the cost ``c = alpha log pi``.
    """
    return per_task(cost_B - q_QB.amin(0), num_tasks)


def deterministic_actor_loss(q_B: Tensor, num_tasks: int) -> Tensor:
    """Return each task's ``L_pi = mean -Q_1(s, pi(s))``, ``[R]``.

    Its gradient is that of algorithm 1 in Fujimoto et al. 2018, "Addressing Function Approximation
    Error in Actor-Critic Methods" (arXiv 1802.09477): the first critic's alone.
    """
    return per_task(-q_B, num_tasks)


def smoothed_action(action_BA: Tensor, noise_BA: Tensor, std: float, clip: float) -> Tensor:
    """Return ``clip(pi'(s') + clip(std eps, -c, c), -1, 1)``, ``[B, A]``.

    Target policy smoothing, algorithm 1 in Fujimoto et al. 2018 (arXiv 1802.09477).

    Args:
        action_BA: the target policy's actions ``pi'(s')``.
        noise_BA: standard normal noise ``eps``.
        std: standard deviation of the smoothing, ``sigma`` in the paper.
        clip: largest magnitude of the smoothing, ``c`` in the paper.
    """
    return (action_BA + (std * noise_BA).clamp(-clip, clip)).clamp(-1, 1)


def temperature_loss(
    log_alpha_B: Tensor, log_prob_B: Tensor, target_entropy: Tensor | float, num_tasks: int
) -> Tensor:
    """Return each task's ``L_alpha = mean -log alpha (log pi + H)``, ``[R]``.

    Equation 18, in ``log alpha``. The target entropy ``H`` is a number, or one for each row
    ``[B]``.
    """
    return per_task(-log_alpha_B * (log_prob_B + target_entropy), num_tasks)
