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
B = NUM_TASKS * ROWS


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def test_per_task_by_hand():
    loss_B = torch.tensor([1.0, 3.0, 10.0, 20.0, -1.0, 0.0])
    assert losses.per_task(loss_B, 3).tolist() == [2, 15, -0.5]
    assert losses.per_task(loss_B, 2).tolist() == pytest.approx([14 / 3, 19 / 3])
    assert losses.per_task(loss_B, 6).tolist() == loss_B.tolist()


def test_per_task_equals_a_loop_over_the_tasks(draw):
    loss_B, task_B = draw(B), torch.arange(NUM_TASKS).repeat_interleave(ROWS)
    wanted = [loss_B[task_B == task].mean() for task in range(NUM_TASKS)]
    torch.testing.assert_close(losses.per_task(loss_B, NUM_TASKS), torch.stack(wanted))


def test_the_target_by_hand():
    target = losses.critic_target(
        reward_B=torch.tensor([1.0, 1.0, -2.0]),
        terminated_B=torch.tensor([False, True, False]),
        next_q_QB=torch.tensor([[10.0, 10.0, 3.0], [8.0, 9.0, 4.0]]),
        next_cost_B=torch.tensor([-1.0, -1.0, 0.25]),
        discount=0.9,
    )
    # 1 + 0.9 (8 + 1), 1, -2 + 0.9 (3 - 0.25)
    assert target.tolist() == pytest.approx([9.1, 1.0, 0.475])


def target_of(terminated, next_q=((5.0,),), discount=0.9):
    return losses.critic_target(
        torch.tensor([1.0]),
        torch.tensor([terminated]),
        torch.tensor(next_q),
        torch.zeros(1),
        discount,
    ).item()


def test_termination_cuts_the_bootstrap():
    assert target_of(terminated=True) == 1
    assert target_of(terminated=False) == pytest.approx(1 + 0.9 * 5)


def test_truncation_cannot_cut_the_bootstrap_because_no_batch_carries_it():
    assert "terminated_B" in TransitionBatch._fields
    assert not [field for field in TransitionBatch._fields if "trunc" in field or "done" in field]


@pytest.mark.parametrize("next_q", [((float("inf"),),), ((float("nan"),),)])
def test_what_comes_after_a_termination_is_not_looked_at(next_q):
    assert target_of(terminated=True, next_q=next_q) == 1


@pytest.mark.parametrize("next_q", [((3.0,), (7.0,)), ((7.0,), (3.0,)), ((7.0,), (9.0,), (3.0,))])
def test_the_smallest_critic_counts_in_the_target(next_q):
    assert target_of(False, next_q, discount=1.0) == 4


def test_the_target_equals_a_loop(draw):
    reward = draw(B)
    cost = draw(B)
    q = draw(NUM_CRITICS, B)
    terminated = draw(B) > 0.5
    wanted = [
        reward[b].item()
        + 0.97 * (1 - int(terminated[b])) * (min(q[:, b].tolist()) - cost[b].item())
        for b in range(B)
    ]
    target = losses.critic_target(reward, terminated, q, cost, 0.97)
    torch.testing.assert_close(target, torch.tensor(wanted, dtype=torch.float64))


def test_the_critics_loss_by_hand():
    q_QB = torch.tensor([[1.0, 2.0, 0.0, 0.0], [3.0, 2.0, 1.0, 5.0]])
    target_B = torch.tensor([2.0, 0.0, 1.0, 1.0])
    # task 0: (1 + 4) / 2 + (1 + 4) / 2, task 1: (1 + 1) / 2 + (0 + 16) / 2
    assert losses.critic_loss(q_QB, target_B, 2).tolist() == [5, 9]


def test_the_critics_loss_is_the_sum_of_the_mean_squared_errors(draw):
    q_QB, target_B = draw(NUM_CRITICS, B), draw(B)
    whole = sum(torch.nn.functional.mse_loss(q_B, target_B) for q_B in q_QB)
    torch.testing.assert_close(losses.critic_loss(q_QB, target_B, NUM_TASKS).mean(), whole)


def test_the_actors_loss_by_hand():
    cost_B = torch.tensor([0.5, -0.5, 4.0, 0.0])
    q_QB = torch.tensor([[1.0, 5.0, 2.0, 2.0], [3.0, 4.0, 1.0, 9.0]])
    # task 0: (0.5 - 1) and (-0.5 - 4), task 1: (4 - 1) and (0 - 2)
    assert losses.actor_loss(cost_B, q_QB, 2).tolist() == [-2.5, 0.5]


def test_the_actors_loss_equals_a_loop(draw):
    cost = draw(B)
    q = draw(NUM_CRITICS, B)
    each = [cost[b].item() - min(q[:, b].tolist()) for b in range(B)]
    wanted = [sum(each[task * ROWS : (task + 1) * ROWS]) / ROWS for task in range(NUM_TASKS)]
    found = losses.actor_loss(cost, q, NUM_TASKS)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


def test_the_temperatures_loss_by_hand():
    log_alpha_B = torch.tensor([1.0, 1.0, -0.5, -0.5])
    log_prob_B = torch.tensor([3.0, 1.0, -4.0, -1.0])
    # -1 * (2 - 2), 0.5 * (-2.5 - 2)
    assert losses.temperature_loss(log_alpha_B, log_prob_B, -2.0, 2).tolist() == [0, -2.25]


@pytest.mark.parametrize("entropy", [3.0, 1.0])
def test_the_temperature_rises_when_the_entropy_is_below_its_target_and_falls_above(entropy):
    log_alpha = torch.zeros(1, requires_grad=True)
    losses.temperature_loss(
        log_alpha.expand(4), torch.full((4,), -entropy), 2.0, 1
    ).sum().backward()
    assert log_alpha.grad.item() == pytest.approx(entropy - 2.0)  # descent: up if negative


def test_tasks_averaged_are_the_batch(draw):
    log_prob = draw(B)
    alpha = draw(B).abs()
    q = draw(NUM_CRITICS, B)
    target = draw(B)
    pairs = [
        (losses.critic_loss(q, target, NUM_TASKS), losses.critic_loss(q, target, 1)),
        (
            losses.actor_loss(log_prob, q, NUM_TASKS),
            losses.actor_loss(log_prob, q, 1),
        ),
        (
            losses.temperature_loss(alpha.log(), log_prob, -2.0, NUM_TASKS),
            losses.temperature_loss(alpha.log(), log_prob, -2.0, 1),
        ),
    ]
    for by_task, whole in pairs:
        assert by_task.shape == (NUM_TASKS,)
        torch.testing.assert_close(by_task.mean(), whole[0])


def test_the_losses_change_nothing_that_they_are_given(draw):
    given = [draw(B), draw(B).abs(), draw(NUM_CRITICS, B)]
    before = [value.clone() for value in given]
    log_prob, alpha, q = given
    losses.critic_target(log_prob, log_prob > 0, q, log_prob, 0.9)
    losses.critic_loss(q, log_prob, NUM_TASKS)
    losses.actor_loss(log_prob, q, NUM_TASKS)
    losses.temperature_loss(alpha, log_prob, -math.pi, NUM_TASKS)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
