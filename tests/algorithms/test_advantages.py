"""Advantages and losses of PPO by hand, and against slow loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from mtrl_lightning.algorithms import advantages

NUM_STEPS = 40
NUM_ENVS = 7
DISCOUNT = 0.9
TRACE_DECAY = 0.8
CLIP = 0.2


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


# ---- advantages ----


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
    log_ratio_Rn = (log_prob_Rn - old_log_prob_Rn).requires_grad_()
    surrogate_Rn = advantages.surrogate_loss(log_ratio_Rn, advantage_Rn, CLIP)
    found_R = surrogate_Rn.mean(1)
    gradients_Rn = torch.autograd.grad(surrogate_Rn.sum(), log_ratio_Rn)[0]
    kinds = set()
    for task in range(num_tasks):
        total = 0.0
        for row in range(rows):
            ratio = math.exp(log_prob_Rn[task, row].item() - old_log_prob_Rn[task, row].item())
            advantage = advantage_Rn[task, row].item()
            if advantage > 0:  # no reward for a ratio above 1 + clip
                total -= min(ratio, 1 + CLIP) * advantage
                is_active = ratio < 1 + CLIP
            else:  # none for a ratio below 1 - clip
                total -= max(ratio, 1 - CLIP) * advantage
                is_active = ratio > 1 - CLIP
            # d ratio / d log ratio = ratio
            wanted = -ratio * advantage if is_active else 0.0
            assert gradients_Rn[task, row].item() == pytest.approx(wanted, rel=1e-10)
            kinds.add((advantage > 0, ratio > 1 + CLIP, ratio < 1 - CLIP))
        assert found_R[task].item() == pytest.approx(total / rows, rel=1e-10)
    assert len(kinds) == 6, "both signs with ratios below, within and above the clip"


# ---- the divergence ----


def test_the_estimated_divergence_is_near_the_analytic_one():
    old = Normal(torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.8, dtype=torch.float64))
    new = Normal(torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64))
    noise_B = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).double()
    sample_B = old.mean + old.stddev * noise_B
    log_ratio_B = new.log_prob(sample_B) - old.log_prob(sample_B)
    found, _ = advantages.kl_and_clip_fraction(log_ratio_B, CLIP, torch.ones(1))
    wanted = kl_divergence(old, new).item()
    assert found.item() == pytest.approx(wanted, rel=0.02)
    assert kl_divergence(new, old).item() != pytest.approx(wanted, rel=0.1), "it has a direction"


def test_a_small_divergence_keeps_its_digits_in_single_precision():
    # (exp(x) - 1) - x = x^2 / 2 + x^3 / 6 + ...
    found, _ = advantages.kl_and_clip_fraction(torch.full((4,), 1e-3), CLIP, torch.ones(1))
    assert found.item() == pytest.approx(0.5e-6, rel=1e-3)


def test_the_clip_fraction_counts_ratios_beyond_both_bounds():
    ratio_N = torch.tensor([1 - 2 * CLIP, 1 - 0.9 * CLIP, 1.0, 1 + 0.9 * CLIP, 1 + 1.1 * CLIP])
    _, fraction = advantages.kl_and_clip_fraction(ratio_N.log(), CLIP, torch.ones(1))
    assert fraction.item() == pytest.approx(2 / 5)
    weight_N = torch.tensor([0.5, 1.0, 1.0, 1.0, 1.0])
    _, fraction = advantages.kl_and_clip_fraction(ratio_N.log(), CLIP, weight_N)
    assert fraction.item() == pytest.approx(1.5 / 4.5)
