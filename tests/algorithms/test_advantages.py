"""Advantages and losses of PPO by hand, and against slow loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from mtrl_lightning.learning import advantages

NUM_STEPS = 40
NUM_ENVS = 7
DISCOUNT = 0.9
TRACE_DECAY = 0.8
CLIP = 0.2


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def column(*values):
    """One environment's steps, ``[S, 1]``."""
    return torch.tensor(values)[:, None]


def flags(num_steps, *at):
    """One environment's steps, True at some of them."""
    return column(*(step in at for step in range(num_steps)))


# ---- advantages ----


def by_hand(terminated=(), cut=(2,)):
    return advantages.generalized_advantages(
        reward_SE=column(1.0, 2.0, 3.0),
        value_SE=column(4.0, 5.0, 6.0),
        next_value_SE=column(5.0, 6.0, 10.0),
        terminated_SE=flags(3, *terminated),
        cut_SE=flags(3, *cut),
        discount=0.5,
        gae_lambda=0.4,
    )[:, 0].tolist()


def test_three_steps_by_hand():
    # deltas: 1 + 0.5 * 5 - 4 = -0.5, 2 + 0.5 * 6 - 5 = 0, 3 + 0.5 * 10 - 6 = 2
    # sums with the factor 0.5 * 0.4 = 0.2: 2, 0 + 0.2 * 2 = 0.4, -0.5 + 0.2 * 0.4 = -0.42
    assert by_hand() == pytest.approx([-0.42, 0.4, 2])


def test_a_termination_bootstraps_nothing_by_hand():
    # deltas: -0.5, 2 - 5 = -3, 2
    assert by_hand(terminated=(1,), cut=(1, 2)) == pytest.approx([-0.5 - 0.2 * 3, -3, 2])


def test_a_truncation_bootstraps_the_successor_and_cuts_the_trace_by_hand():
    # deltas: -0.5, 0, 2; the middle one stays alone
    assert by_hand(cut=(1, 2)) == pytest.approx([-0.5, 0, 2])
    assert by_hand(cut=(0, 1, 2)) == pytest.approx([-0.5, 0, 2])
    assert by_hand(cut=(0, 2)) == pytest.approx([-0.5, 0.4, 2])


class Rollout:
    """Random steps with episodes' ends, and with gaps where an environment was rebuilt.

    The value of a successor is the value of the next row, where that is the successor.
    """

    def __init__(self, draw) -> None:
        shape = (NUM_STEPS, NUM_ENVS)
        generator = np.random.default_rng(1)
        self.reward_SE = draw(*shape)
        self.value_SE = draw(*shape)
        kind_SE = torch.from_numpy(generator.choice(4, shape, p=[0.76, 0.08, 0.08, 0.08]))
        self.valid_SE = kind_SE != 3
        self.terminated_SE = kind_SE == 1
        self.truncated_SE = kind_SE == 2
        self.cut_SE = advantages.episode_cuts(self.terminated_SE, self.truncated_SE, self.valid_SE)
        own_SE = draw(*shape)
        following_SE = torch.cat([self.value_SE[1:], own_SE[-1:]])
        self.next_value_SE = torch.where(self.cut_SE, own_SE, following_SE)

    def advantages(self, discount=DISCOUNT, gae_lambda=TRACE_DECAY):
        return advantages.generalized_advantages(
            self.reward_SE,
            self.value_SE,
            self.next_value_SE,
            self.terminated_SE,
            self.cut_SE,
            discount,
            gae_lambda,
        )

    def chains(self, env):
        """The rows of each stretch of steps that follow one another, as ``[first, end)``."""
        first = 0
        for step in range(NUM_STEPS):
            if not self.valid_SE[step, env]:
                if first < step:
                    yield first, step
                first = step + 1
            elif self.terminated_SE[step, env] or self.truncated_SE[step, env]:
                yield first, step + 1
                first = step + 1
        if first < NUM_STEPS:
            yield first, NUM_STEPS

    def naive_advantages(self, discount=DISCOUNT, gae_lambda=TRACE_DECAY):
        """Equation 16 as the double sum that it is; NaN where nothing happened."""
        wanted_SE = torch.full((NUM_STEPS, NUM_ENVS), math.nan, dtype=torch.float64)
        for env in range(NUM_ENVS):
            for first, end in self.chains(env):
                for step in range(first, end):
                    total = 0.0
                    for later in range(step, end):
                        successor = self.next_value_SE[later, env]
                        if self.terminated_SE[later, env]:
                            successor = 0.0
                        delta = self.reward_SE[later, env] + discount * successor
                        delta = delta - self.value_SE[later, env]
                        total += (discount * gae_lambda) ** (later - step) * delta
                    wanted_SE[step, env] = total
        return wanted_SE


@pytest.mark.parametrize("discount", [1.0, DISCOUNT, 0.0])
@pytest.mark.parametrize("gae_lambda", [1.0, TRACE_DECAY, 0.0])
def test_advantages_equal_a_loop_over_each_environments_episodes(draw, discount, gae_lambda):
    rollout = Rollout(draw)
    assert 0.01 < (~rollout.valid_SE).float().mean() < 0.2
    found_SE = rollout.advantages(discount, gae_lambda)
    wanted_SE = rollout.naive_advantages(discount, gae_lambda)
    assert torch.equal(wanted_SE.isnan(), ~rollout.valid_SE)
    torch.testing.assert_close(found_SE[rollout.valid_SE], wanted_SE[rollout.valid_SE])


def test_nothing_of_a_dropped_row_reaches_another(draw):
    rollout = Rollout(draw)
    before_SE = rollout.advantages()
    gap_SE = ~rollout.valid_SE
    for values_SE in (rollout.reward_SE, rollout.value_SE, rollout.next_value_SE):
        values_SE[gap_SE] = 1e6
    after_SE = rollout.advantages()
    assert torch.equal(after_SE[rollout.valid_SE], before_SE[rollout.valid_SE])


def test_with_lambda_0_the_advantage_is_the_one_step_error(draw):
    rollout = Rollout(draw)
    continues_SE = (~rollout.terminated_SE).double()
    wanted_SE = (
        rollout.reward_SE + DISCOUNT * continues_SE * rollout.next_value_SE - rollout.value_SE
    )
    torch.testing.assert_close(rollout.advantages(gae_lambda=0.0), wanted_SE)


def test_with_lambda_1_the_advantage_is_the_discounted_return_minus_the_value(draw):
    rollout = Rollout(draw)
    found_SE = rollout.advantages(gae_lambda=1.0)
    for env in range(NUM_ENVS):
        for first, end in rollout.chains(env):
            is_over = rollout.terminated_SE[end - 1, env]
            return_ = 0.0 if is_over else rollout.next_value_SE[end - 1, env].item()
            for step in reversed(range(first, end)):
                return_ = rollout.reward_SE[step, env].item() + DISCOUNT * return_
                wanted = return_ - rollout.value_SE[step, env].item()
                assert found_SE[step, env].item() == pytest.approx(wanted, abs=1e-12)


def test_episode_cuts_by_hand():
    # steps:                      0      1      2     3 (gap)  4      5
    terminated_SE = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0], [0, 0], [0, 0]]).bool()
    truncated_SE = torch.tensor([[0, 1], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]]).bool()
    valid_SE = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 1], [1, 1], [1, 0]]).bool()
    cut_SE = advantages.episode_cuts(terminated_SE, truncated_SE, valid_SE)
    # the first environment: terminated at 1, a gap after 2, the end at 5; the step before the
    # valid row 4 is the gap itself. The second: truncated at 0, a gap after 4, the end at 5
    assert cut_SE[:, 0].tolist() == [False, True, True, False, False, True]
    assert cut_SE[:, 1].tolist() == [True, False, False, False, True, True]


# ---- moments ----


def test_the_moments_equal_numpys_for_each_task(draw):
    value_SE = 3 * draw(NUM_STEPS, NUM_ENVS) + 100
    task_E = torch.tensor([2, 0, 0, 4, 2, 0, 4])
    valid_SE = draw(NUM_STEPS, NUM_ENVS) > -1
    valid_SE[:, 3] = False
    valid_SE[:, 6] = False  # so that task 4 has environments and no rows; 1 and 3 have neither
    value_SE[~valid_SE] = 1e9
    mean_T, variance_T, count_T = advantages.task_moments(value_SE, task_E, valid_SE, 5)
    for task in (0, 2):
        is_own_E = task_E == task
        rows = value_SE[:, is_own_E][valid_SE[:, is_own_E]].numpy()
        assert count_T[task] == len(rows)
        assert mean_T[task].item() == pytest.approx(rows.mean(), rel=1e-10)
        assert variance_T[task].item() == pytest.approx(rows.var(), rel=1e-10)
    for task in (1, 3, 4):
        assert (mean_T[task], variance_T[task], count_T[task]) == (0, 0, 0)


def test_the_variance_of_large_equal_values_is_zero():
    value_SE = torch.full((30, 2), 4096.0)  # in single precision
    _, variance_T, count_T = advantages.task_moments(
        value_SE, torch.tensor([0, 1]), torch.ones(30, 2, dtype=torch.bool), 2
    )
    assert variance_T.tolist() == [0, 0]
    assert count_T.tolist() == [30, 30]


# ---- losses ----


def test_the_surrogate_equals_a_loop_over_the_rows(draw):
    num_tasks, rows = 3, 50
    log_prob_Rn = draw(num_tasks, rows)
    old_log_prob_Rn = log_prob_Rn + 0.4 * draw(num_tasks, rows)
    advantage_Rn = draw(num_tasks, rows)
    found_R = advantages.surrogate_loss(log_prob_Rn, old_log_prob_Rn, advantage_Rn, CLIP).mean(1)
    kinds = set()
    for task in range(num_tasks):
        total = 0.0
        for row in range(rows):
            ratio = math.exp(log_prob_Rn[task, row].item() - old_log_prob_Rn[task, row].item())
            advantage = advantage_Rn[task, row].item()
            if advantage > 0:  # no reward for a ratio above 1 + clip
                total -= min(ratio, 1 + CLIP) * advantage
            else:  # none for a ratio below 1 - clip
                total -= max(ratio, 1 - CLIP) * advantage
            kinds.add((advantage > 0, ratio > 1 + CLIP, ratio < 1 - CLIP))
        assert found_R[task].item() == pytest.approx(total / rows, rel=1e-10)
    assert len(kinds) == 6, "both signs with ratios below, within and above the clip"


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.0, 2.0, -2.0),
        (1.0, -2.0, 2.0),
        (1.1, 2.0, -2.0 * 1.1),
        (1.3, 2.0, 0.0),
        (0.7, -2.0, 0.0),
        (0.7, 2.0, -2.0 * 0.7),
        (1.3, -2.0, 2.0 * 1.3),
    ],
)
def test_the_gradient_is_zero_where_the_ratio_has_moved_far_enough(ratio, advantage, slope):
    log_prob_Rn = torch.tensor([[math.log(ratio)]], requires_grad=True)
    advantage_Rn = torch.tensor([[advantage]])
    loss_R = advantages.surrogate_loss(log_prob_Rn, torch.zeros(1, 1), advantage_Rn, CLIP).mean(1)
    loss_R.sum().backward()
    # the gradient of -ratio A with respect to the log density is -ratio A
    assert log_prob_Rn.grad.item() == pytest.approx(slope, abs=1e-6)


def test_the_value_loss_equals_a_loop_over_the_rows(draw):
    num_tasks, rows = 3, 40
    value_Rn, target_Rn, old_value_Rn = (draw(num_tasks, rows) for _ in range(3))
    for clip in (None, 0.3):
        found_R = advantages.value_loss(value_Rn, target_Rn, old_value_Rn, clip).mean(1)
        num_clipped = 0
        for task in range(num_tasks):
            total = 0.0
            for row in range(rows):
                value = value_Rn[task, row].item()
                target = target_Rn[task, row].item()
                error = (value - target) ** 2
                if clip is not None:
                    old = old_value_Rn[task, row].item()
                    near = min(max(value, old - clip), old + clip)
                    if (near - target) ** 2 > error:
                        error = (near - target) ** 2
                        num_clipped += 1
                total += error
            assert found_R[task].item() == pytest.approx(total / rows, rel=1e-10)
        assert num_clipped > 10 or clip is None


def test_a_clipped_value_that_has_moved_towards_its_target_has_no_gradient():
    # it moved by 0.5 towards the target 2, and 0.3 is allowed: its error counts as (1.3 - 2)^2
    value_Rn = torch.tensor([[1.5, 0.5]], requires_grad=True)
    target_Rn = torch.full((1, 2), 2.0)
    loss_R = advantages.value_loss(value_Rn, target_Rn, torch.ones(1, 2), 0.3).mean(1)
    assert loss_R.item() == pytest.approx((0.7**2 + 1.5**2) / 2)
    loss_R.sum().backward()
    # the other moved away from it, which is corrected: 2 (0.5 - 2) / 2
    assert value_Rn.grad[0].tolist() == pytest.approx([0, -1.5])


# ---- the divergence ----


def test_the_estimated_divergence_is_near_the_analytic_one():
    old = Normal(torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.8, dtype=torch.float64))
    new = Normal(torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64))
    noise_B = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).double()
    sample_B = old.mean + old.stddev * noise_B
    found = advantages.approximate_kl(new.log_prob(sample_B), old.log_prob(sample_B))
    wanted = kl_divergence(old, new).item()
    assert found.item() == pytest.approx(wanted, rel=0.02)
    assert kl_divergence(new, old).item() != pytest.approx(wanted, rel=0.1), "it has a direction"


def test_the_estimated_divergence_is_never_negative(draw):
    for scale in (1e-4, 0.1, 1.0):
        log_prob_B = draw(1000)
        old_log_prob_B = log_prob_B + scale * draw(1000)
        for row in range(1000):
            one = slice(row, row + 1)
            assert advantages.approximate_kl(log_prob_B[one], old_log_prob_B[one]) >= 0
    assert advantages.approximate_kl(log_prob_B, log_prob_B) == 0


def test_a_small_divergence_keeps_its_digits_in_single_precision():
    # (exp(x) - 1) - x = x^2 / 2 + x^3 / 6 + ...
    found = advantages.approximate_kl(torch.full((4,), 1e-3), torch.zeros(4))
    assert found.item() == pytest.approx(0.5e-6, rel=1e-3)
