"""Checks of the ranges of options; ``test_registry.py`` has what they refuse."""

from __future__ import annotations

import math

import numpy as np

from mtrl_lightning.checks import above, at_least, increasing, nearest_multiples, one_of, within


def test_allowed_numbers_and_none_pass():
    at_least(1, num_critics=1, depth=np.int64(3), num_sampled=None)
    above(0, tau=1e-9, max_grad_norm=math.inf, lr=None)
    within(0, 1, discount=0, decay=np.float32(1), encoder_tau=None)
    within(0, 1, above_low=True, below_high=True, rate=0.5)
    increasing(low=-20, high=2)
    one_of(("stop", "skip"), on_nonfinite="skip")


def test_nearest_multiples_are_above_zero():
    expected = {191: "189 or 192", 2: "3", -5: "3", 4: "3 or 6"}
    assert {number: nearest_multiples(number, 3) for number in expected} == expected
