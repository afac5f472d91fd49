"""Moments, the value's loss and estimated divergences of PPO by hand and against NumPy.

The policy's loss is in the updates of ``test_ppo.py``.
"""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.algorithms import advantages

CLIP = 0.2


def test_the_moments_equal_numpys_for_each_task():
    generator = torch.Generator().manual_seed(0)
    value_SE = 3 * torch.randn(40, 7, generator=generator).double() + 100
    task_E = torch.tensor([2, 0, 0, 4, 2, 0, 4])
    valid_SE = torch.randn(40, 7, generator=generator) > -1
    valid_SE[:, [3, 6]] = False
    valid_SE[5, 6] = True  # task 4 has one row; 1 and 3 have none
    value_SE[~valid_SE] = 1e9
    mean_T, variance_T, count_T = advantages.task_moments(value_SE, task_E, valid_SE, 5)
    for task in (0, 2, 4):
        rows = value_SE[valid_SE & (task_E == task)].numpy()
        assert count_T[task] == len(rows)
        assert mean_T[task].item() == pytest.approx(rows.mean(), rel=1e-10)
        assert variance_T[task].item() == pytest.approx(rows.var(), rel=1e-10)
    for task in (1, 3):
        assert (mean_T[task], variance_T[task], count_T[task]) == (0, 0, 0)


def test_the_variance_of_large_equal_values_is_zero():
    value_SE = torch.full((30, 2), 4096.0)  # in single precision
    valid_SE = torch.ones(30, 2, dtype=torch.bool)
    _, variance_T, _ = advantages.task_moments(value_SE, torch.tensor([0, 1]), valid_SE, 2)
    assert variance_T.tolist() == [0, 0]


def test_the_clipped_value_counts_where_its_error_is_larger():
    value_n, target_n = torch.tensor([[1.0, -1.0, 0.1, 1.0], [1.0, -1.0, 1.0, 0.0]])
    # the clipped values are 0.2, -0.2, 0.1 and 0.2
    loss_n = advantages.value_loss(value_n, target_n, torch.zeros(4), clip=0.2)
    torch.testing.assert_close(loss_n, torch.tensor([0.64, 0.64, 0.81, 1.0]))
    plain_n = advantages.value_loss(value_n, target_n, None, clip=None)
    torch.testing.assert_close(plain_n, torch.tensor([0.0, 0.0, 0.81, 1.0]))


def test_a_small_divergence_keeps_its_digits_in_single_precision():
    # (exp(x) - 1) - x = x^2 / 2 + x^3 / 6 + ...
    found, _ = advantages.kl_and_clip_fraction(torch.full((4,), 1e-3), CLIP, torch.ones(1))
    assert found.item() == pytest.approx(0.5e-6, rel=1e-3)


@pytest.mark.parametrize(("first_weight", "wanted"), [(1.0, 2 / 5), (0.5, 1.5 / 4.5)])
def test_clip_fraction_counts_weighted_ratios_beyond_both_bounds(first_weight, wanted):
    ratio_N = torch.tensor([1 - 2 * CLIP, 1 - 0.9 * CLIP, 1.0, 1 + 0.9 * CLIP, 1 + 1.1 * CLIP])
    weight_N = torch.tensor([first_weight, 1.0, 1.0, 1.0, 1.0])
    _, fraction = advantages.kl_and_clip_fraction(ratio_N.log(), CLIP, weight_N)
    assert fraction.item() == pytest.approx(wanted)
