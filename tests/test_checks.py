"""Checks of the ranges of options."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mtrl_lightning.checks import above, at_least, increasing, nearest_multiples, one_of, within
from mtrl_lightning.errors import ConfigurationError


def test_allowed_numbers_and_none_pass():
    at_least(1, num_critics=1, depth=np.int64(3), num_sampled=None)
    above(0, tau=1e-9, max_grad_norm=math.inf, lr=None)
    within(0, 1, discount=0, decay=np.float32(1), encoder_tau=None)
    within(0, 1, above_low=True, below_high=True, rate=0.5)
    increasing(low=-20, high=2)
    one_of(("stop", "skip"), on_nonfinite="skip")


@pytest.mark.parametrize(
    ("check", "args", "options", "name"),
    [
        (at_least, (1,), {"width": 4, "depth": 0}, "depth"),
        (at_least, (1,), {"prefix": "rollout.", "num": 0}, r"rollout\.num"),
        (above, (0,), {"tau": 0.0}, "tau"),
        (above, (0,), {"std": math.inf, "finite": True}, "std"),
        (within, (0, 1), {"discount": 1.5}, "discount"),
        (within, (0, 1), {"discount": -0.1}, "discount"),
        (within, (0, 1), {"tau": 0, "above_low": True}, "tau"),
        (within, (0, 1), {"discount": 1, "below_high": True}, "discount"),
        (increasing, (), {"low": 2, "high": 2}, "low"),
        (increasing, (), {"low": math.nan, "high": 2}, "low"),
        (one_of, (("stop", "skip"),), {"how": "go"}, "how"),
        *(
            (check, args, {"tau": value}, "tau")
            for value in (math.nan, "1")
            for check, args in ((at_least, (0,)), (above, (0,)), (within, (0, 1)))
        ),
    ],
)
def test_value_out_of_range_is_refused_by_its_name(check, args, options, name):
    with pytest.raises(ConfigurationError, match=name):
        check(*args, **options)


def test_nearest_multiples_are_above_zero():
    expected = {191: "189 or 192", 2: "3", -5: "3", 4: "3 or 6"}
    assert {number: nearest_multiples(number, 3) for number in expected} == expected
