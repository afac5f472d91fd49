"""The losses by hand, and against slow loops."""

from __future__ import annotations

import math

import pytest
import torch

from mtrl_lightning.learning import losses
from mtrl_lightning.types import TransitionBatch

NUM_TASKS = 3
ROWS = 4
NUM_CRITICS = 2
SHAPE = (NUM_TASKS, ROWS)


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


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


def test_termination_cuts_the_bootstrap():
    assert target_of(terminated=True) == 1
    assert target_of(terminated=False) == pytest.approx(1 + 0.9 * 5)


def test_truncation_cannot_cut_the_bootstrap_because_no_batch_carries_it():
    assert "terminated_Rn" in TransitionBatch._fields
    assert not [field for field in TransitionBatch._fields if "trunc" in field or "done" in field]


@pytest.mark.parametrize("next_q", [(float("inf"),), (float("nan"),)])
def test_what_comes_after_a_termination_is_not_looked_at(next_q):
    assert target_of(terminated=True, next_q=next_q) == 1


@pytest.mark.parametrize("next_q", [(3.0, 7.0), (7.0, 3.0), (7.0, 9.0, 3.0)])
def test_the_smallest_critic_counts_in_the_target(next_q):
    assert target_of(False, next_q, discount=1.0) == 4


def test_the_target_equals_a_loop(draw):
    reward = draw(*SHAPE)
    cost = draw(*SHAPE)
    q = draw(NUM_CRITICS, *SHAPE)
    terminated = draw(*SHAPE) > 0.5
    wanted = [
        [
            reward[i, j].item()
            + 0.97 * (1 - int(terminated[i, j])) * (min(q[:, i, j].tolist()) - cost[i, j].item())
            for j in range(ROWS)
        ]
        for i in range(NUM_TASKS)
    ]
    target = losses.critic_target(reward, terminated, q, cost, 0.97)
    torch.testing.assert_close(target, torch.tensor(wanted, dtype=torch.float64))


def test_the_critics_loss_by_hand():
    q_QRn = torch.tensor([[[1.0, 2.0], [0.0, 0.0]], [[3.0, 2.0], [1.0, 5.0]]])
    target_Rn = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    # task 0: (1 + 4) / 2 + (1 + 4) / 2, task 1: (1 + 1) / 2 + (0 + 16) / 2
    assert losses.critic_loss(q_QRn, target_Rn).tolist() == [5, 9]


def test_the_critics_loss_is_the_sum_of_the_mean_squared_errors(draw):
    q_QRn = draw(NUM_CRITICS, *SHAPE)
    target_Rn = draw(*SHAPE)
    whole = sum(torch.nn.functional.mse_loss(q_Rn, target_Rn) for q_Rn in q_QRn)
    torch.testing.assert_close(losses.critic_loss(q_QRn, target_Rn).mean(), whole)


def test_the_actors_loss_by_hand():
    cost_Rn = torch.tensor([[0.5, -0.5], [4.0, 0.0]])
    q_QRn = torch.tensor([[[1.0, 5.0], [2.0, 2.0]], [[3.0, 4.0], [1.0, 9.0]]])
    # task 0: (0.5 - 1) and (-0.5 - 4), task 1: (4 - 1) and (0 - 2)
    assert losses.actor_loss(cost_Rn, q_QRn).tolist() == [-2.5, 0.5]


def test_the_actors_loss_equals_a_loop(draw):
    cost = draw(*SHAPE)
    q = draw(NUM_CRITICS, *SHAPE)
    wanted = [
        sum(cost[i, j].item() - min(q[:, i, j].tolist()) for j in range(ROWS)) / ROWS
        for i in range(NUM_TASKS)
    ]
    found = losses.actor_loss(cost, q)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


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


@pytest.mark.parametrize("entropy", [3.0, 1.0])
def test_the_temperature_rises_when_the_entropy_is_below_its_target_and_falls_above(entropy):
    log_alpha = torch.zeros(1, requires_grad=True)
    log_prob_Rn = torch.full((1, 4), -entropy)
    losses.temperature_loss(log_alpha.expand(1, 4), log_prob_Rn, 2.0).sum().backward()
    assert log_alpha.grad.item() == pytest.approx(entropy - 2.0)  # descent: up if negative


def test_tasks_averaged_are_the_batch(draw):
    log_prob = draw(*SHAPE)
    alpha = draw(*SHAPE).abs()
    q = draw(NUM_CRITICS, *SHAPE)
    target = draw(*SHAPE)

    def as_one_task(value):
        return value.reshape(*value.shape[:-2], 1, -1)

    def all_losses(log_prob, alpha, q, target):
        return (
            losses.critic_loss(q, target),
            losses.actor_loss(log_prob, q),
            losses.deterministic_actor_loss(target),
            losses.temperature_loss(alpha.log(), log_prob, -2.0),
        )

    given = (log_prob, alpha, q, target)
    pairs = zip(all_losses(*given), all_losses(*map(as_one_task, given)), strict=True)
    for by_task, whole in pairs:
        assert by_task.shape == (NUM_TASKS,)
        assert whole.shape == (1,)
        torch.testing.assert_close(by_task.mean(), whole[0])


def test_the_losses_change_nothing_that_they_are_given(draw):
    given = [draw(*SHAPE), draw(*SHAPE).abs(), draw(NUM_CRITICS, *SHAPE)]
    before = [value.clone() for value in given]
    log_prob, alpha, q = given
    losses.critic_target(log_prob, log_prob > 0, q, log_prob, 0.9)
    losses.critic_loss(q, log_prob)
    losses.actor_loss(log_prob, q)
    losses.temperature_loss(alpha, log_prob, -math.pi)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
