"""The estimated divergence and the clip fraction; the rest is in the updates of test_ppo.py."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.algorithms.advantages import kl_and_clip_fraction


def test_divergence_of_small_ratios_keeps_its_digits():
    # (exp(x) - 1) - x = x^2 / 2 + x^3 / 6 + ...
    found, _ = kl_and_clip_fraction(torch.full((4,), 1e-3), 0.2, torch.ones(1))
    assert found.item() == pytest.approx(0.5e-6, rel=1e-3)


def test_clip_fraction_counts_weighted_ratios_beyond_both_bounds():
    ratio_N = torch.tensor([0.6, 0.82, 1.0, 1.18, 1.22])
    _, fraction = kl_and_clip_fraction(ratio_N.log(), 0.2, torch.tensor([0.5, 1.0, 1, 1, 1]))
    assert fraction.item() == pytest.approx(1.5 / 4.5)
