"""The losses by hand, and against slow loops."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.algorithms import losses


def test_the_target_by_hand():
    target_Rn = losses.critic_target(
        reward_Rn=torch.tensor([[1.0, 1.0, -2.0]]),
        terminated_Rn=torch.tensor([[False, True, False]]),
        next_q_QRn=torch.tensor([[[10.0, 10.0, 3.0]], [[8.0, 9.0, 4.0]]]),
        next_cost_Rn=torch.tensor([[-1.0, -1.0, 0.25]]),
        discount=0.9,
    )
    # 1 + 0.9 (8 + 1), 1, -2 + 0.9 (3 - 0.25)
    assert target_Rn.shape == (1, 3)
    assert target_Rn[0].tolist() == pytest.approx([9.1, 1.0, 0.475])


def target_of(terminated, next_q=(5.0,), discount=0.9):
    return losses.critic_target(
        torch.tensor([[1.0]]),
        torch.tensor([[terminated]]),
        torch.tensor(next_q)[:, None, None],
        torch.zeros(1, 1),
        discount,
    ).item()


@pytest.mark.parametrize("next_q", [(float("inf"),), (float("nan"),)])
def test_what_comes_after_a_termination_is_not_looked_at(next_q):
    assert target_of(terminated=True, next_q=next_q) == 1


def test_the_critics_loss_by_hand():
    q_QRn = torch.tensor([[[1.0, 2.0], [0.0, 0.0]], [[3.0, 2.0], [1.0, 5.0]]])
    target_Rn = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    # task 0: (1 + 4) / 2 + (1 + 4) / 2, task 1: (1 + 1) / 2 + (0 + 16) / 2
    assert losses.critic_loss(q_QRn, target_Rn).tolist() == [5, 9]


def test_the_actors_loss_by_hand():
    cost_Rn = torch.tensor([[0.5, -0.5], [4.0, 0.0]])
    q_QRn = torch.tensor([[[1.0, 5.0], [2.0, 2.0]], [[3.0, 4.0], [1.0, 9.0]]])
    # task 0: (0.5 - 1) and (-0.5 - 4), task 1: (4 - 1) and (0 - 2)
    assert losses.actor_loss(cost_Rn, q_QRn).tolist() == [-2.5, 0.5]


def test_the_deterministic_actors_loss_by_hand():
    q_Rn = torch.tensor([[1.0, 3.0], [10.0, 20.0], [-1.0, 0.0]])
    assert losses.deterministic_actor_loss(q_Rn).tolist() == [-2, -15, 0.5]


def test_the_temperatures_loss_by_hand():
    log_alpha_Rn = torch.tensor([[1.0, 1.0], [-0.5, -0.5]])
    log_prob_Rn = torch.tensor([[3.0, 1.0], [-4.0, -1.0]])
    # -1 * (2 - 2), 0.5 * (-2.5 - 2)
    assert losses.temperature_loss(log_alpha_Rn, log_prob_Rn, -2.0).tolist() == [0, -2.25]
    # -1 * (2 - 1), 0.5 * (-2.5 + 4)
    target_R1 = torch.tensor([[-1.0], [4.0]])
    assert losses.temperature_loss(log_alpha_Rn, log_prob_Rn, target_R1).tolist() == [-1, 0.75]
