"""Checks of options' ranges: what passes, what does not, and the one message."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mtrl_lightning.checks import above, at_least, increasing, nearest_multiples, one_of, within
from mtrl_lightning.errors import ConfigurationError


def message(check: Callable[..., None], *args: Any, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check(*args, **options)
    return str(caught.value)


def test_allowed_numbers_pass() -> None:
    at_least(1, num_critics=1, depth=np.int64(3))
    above(0, tau=1e-9, max_grad_norm=math.inf)
    within(0, 1, discount=0, decay=np.float32(1))
    within(0, 1, above_low=True, below_high=True, rate=0.5)
    increasing(low=-20, high=2)
    one_of(("stop", "skip"), on_nonfinite="skip")


def test_none_is_an_option_that_is_off() -> None:
    at_least(1, num_sampled=None)
    above(0, max_grad_norm=None)
    within(0, 1, encoder_tau=None)


@pytest.mark.parametrize(
    ("check", "args", "options", "expected"),
    [
        (at_least, (1,), {"depth": 0}, "depth is 0: give at least 1"),
        (at_least, (1,), {"width": 4, "depth": 0}, "depth is 0: give at least 1"),
        (at_least, (1,), {"prefix": "rollout.", "num": 0}, "rollout.num is 0: give at least 1"),
        (at_least, (1,), {"hint": ", or null", "num": 0}, "num is 0: give at least 1, or null"),
        (above, (0,), {"tau": 0.0}, "tau is 0.0: give a number above 0"),
        (
            above,
            (0,),
            {"std": math.inf, "finite": True},
            "std is inf: give a finite number above 0",
        ),
        (above, (0,), {"std": -1, "finite": True}, "std is -1: give a finite number above 0"),
        (within, (0, 1), {"discount": 1.5}, "discount is 1.5: give a number from 0 to 1"),
        (within, (0, 1), {"discount": -0.1}, "discount is -0.1: give a number from 0 to 1"),
        (
            within,
            (0, 1),
            {"tau": 0, "above_low": True},
            "tau is 0: give a number above 0 and at most 1",
        ),
        (
            within,
            (0, 1),
            {"discount": 1, "below_high": True},
            "discount is 1: give a number of at least 0 and below 1",
        ),
        (increasing, (), {"low": 2, "high": 2}, "low 2, high 2: give low < high"),
        (increasing, (), {"low": math.nan, "high": 2}, "low nan, high 2: give low < high"),
        (one_of, (("stop", "skip"),), {"how": "go"}, "how is 'go': give one of stop, skip"),
    ],
)
def test_the_message_gives_name_value_and_range(
    check: Callable[..., None], args: tuple[Any, ...], options: dict[str, Any], expected: str
) -> None:
    assert message(check, *args, **options) == expected


@pytest.mark.parametrize(("check", "args"), [(at_least, (0,)), (above, (0,)), (within, (0, 1))])
def test_what_is_no_number_never_passes(
    check: Callable[..., None], args: tuple[float, ...]
) -> None:
    assert message(check, *args, tau=math.nan).startswith("tau is nan: give")
    assert message(check, *args, tau=np.float64("nan")).startswith("tau is nan: give")
    assert message(check, *args, tau="1").startswith("tau is '1': give")


@pytest.mark.parametrize(
    ("number", "expected"), [(191, "189 or 192"), (2, "3"), (0, "3"), (-5, "3"), (4, "3 or 6")]
)
def test_the_nearest_multiples_are_above_zero(number: int, expected: str) -> None:
    assert nearest_multiples(number, 3) == expected


def test_the_checks_import_no_torch() -> None:
    code = "import sys, mtrl_lightning.checks; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
