"""Schedules against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from mtrl_lightning.schedules import Every, Until, UpdateRatio


def steps_at_which_it_fires(schedule, stride, last):
    return [step for step in range(stride, last + 1, stride) if schedule(step)]


def first_steps_at_or_past(interval, stride, last):
    """Return, for each multiple of the interval, the first visited step at or past it."""
    found = [
        math.ceil(Fraction(multiple, stride)) * stride
        for multiple in range(interval, last + 1, interval)
    ]
    return [step for step in found if step <= last]


@pytest.mark.parametrize(
    ("interval", "stride"), [(10_000, 150), (7, 3), (100, 10), (500, 33), (11, 11), (12, 5), (4, 1)]
)
def test_every_equals_a_walk_through_the_multiples(interval, stride):
    last = 20 * interval
    assert steps_at_which_it_fires(Every(interval), stride, last) == first_steps_at_or_past(
        interval, stride, last
    )


def test_every_fires_once_when_a_step_jumps_over_several_multiples():
    every = Every(10)
    assert [every(step) for step in (35, 36, 39, 40, 41)] == [True, False, False, True, False]


def test_every_does_not_fire_at_the_start_or_twice_at_one_step():
    every = Every(10)
    assert not every(0)
    assert every(10)
    assert not every(10)


@pytest.mark.parametrize("cut", [150, 9_900, 10_050, 10_200, 29_850, 30_000])
def test_every_goes_on_where_it_was_saved(cut):
    whole = steps_at_which_it_fires(Every(10_000), 150, 60_000)
    first, second = Every(10_000), Every(10_000)
    before = [step for step in range(150, cut + 1, 150) if first(step)]
    second.load_state_dict(first.state_dict())
    after = [step for step in range(cut + 150, 60_001, 150) if second(step)]
    assert before + after == whole


def test_every_follows_an_interval_that_changed_since_it_was_saved():
    before = Every(10_000)
    for step in range(150, 10_201, 150):
        before(step)
    after = Every(3_000)
    after.load_state_dict(before.state_dict())
    # 9,000 lies behind; the next multiples of 3,000 are 12,000 and 15,000
    assert [step for step in range(10_350, 15_151, 150) if after(step)] == [12_000, 15_000]


def test_until_does_not_begin_again():
    until = Until(10)
    until(10)
    assert not until(3)


def test_until_that_was_over_stays_over_after_a_resume_with_a_larger_limit():
    before, after = Until(10), Until(1_000)
    before(12)
    after.load_state_dict(before.state_dict())
    assert not after(13)


def test_until_that_was_not_over_goes_on_after_a_resume():
    before, after = Until(10), Until(10)
    before(9)
    after.load_state_dict(before.state_dict())
    assert after(9)
    assert not after(10)


RATIOS = [
    (0.1, Fraction(1, 10)),
    (0.5, Fraction(1, 2)),
    (1, Fraction(1)),
    (2, Fraction(2)),
    (1 / 3, Fraction(1, 3)),
    (0.29, Fraction(29, 100)),
]


@pytest.mark.parametrize(("ratio", "exact"), RATIOS)
def test_update_ratio_gives_the_exact_total_at_every_one_of_10000_steps(ratio, exact):
    schedule = UpdateRatio(ratio)
    schedule.start(vector_steps=37, updates=0)
    made = 0
    for step in range(1, 10_001):
        while schedule.due(37 + step, made):
            made += 1
        assert made == math.floor(step * exact)


@pytest.mark.parametrize(("ratio", "exact"), RATIOS)
def test_update_ratio_stays_exact_after_ten_million_steps(ratio, exact):
    schedule = UpdateRatio(ratio)
    schedule.start(0, 0)
    for steps in (9_999_999, 10_000_000, 10_000_001):
        owed = math.floor(steps * exact)
        assert schedule.due(steps, owed - 1)
        assert not schedule.due(steps, owed)


def test_update_ratio_owes_the_burst_at_the_start_and_once_only():
    schedule = UpdateRatio(0.5, burst=1_500)
    schedule.start(1_500, 0)
    assert schedule.due(1_500, 1_499)
    assert not schedule.due(1_500, 1_500)
    assert not schedule.due(1_501, 1_500)
    assert schedule.due(1_502, 1_500)


def test_update_ratio_counts_from_the_first_start():
    schedule = UpdateRatio(1)
    schedule.start(100, 7)
    schedule.start(900, 7)
    assert schedule.due(101, 7)
    assert not schedule.due(101, 8)


@pytest.mark.parametrize("burst", [0, 5])
def test_update_ratio_after_a_restart_owes_nothing_for_earlier_steps_and_no_second_burst(
    burst,
):
    schedule = UpdateRatio(0.5, burst)
    schedule.start(100, 0)
    assert schedule.due(140, burst + 19) and not schedule.due(140, burst + 20)
    schedule.restart(1_000, 25)
    assert not schedule.due(1_001, 25)
    assert schedule.due(1_002, 25)
    assert not schedule.due(1_002, 26)
    schedule.start(2_000, 30)
    assert schedule.due(1_010, 29), "a second start has no effect"


def test_restart_has_no_effect_before_the_start():
    schedule = UpdateRatio(1, burst=3)
    schedule.restart(1_000, 0)
    assert schedule.state_dict() == {}
    schedule.start(2_000, 0)
    assert schedule.due(2_000, 2) and not schedule.due(2_000, 3)


def test_update_ratio_needs_a_start():
    with pytest.raises(AssertionError, match="start"):
        UpdateRatio(1).due(1, 0)


@pytest.mark.parametrize("has_started", [False, True])
def test_update_ratio_continues_from_its_state(has_started):
    before, after = UpdateRatio(1 / 3, burst=5), UpdateRatio(1 / 3, burst=5)
    if has_started:
        before.start(100, 3)
    after.load_state_dict(before.state_dict())
    after.start(400, 20)
    start, made = (100, 3) if has_started else (400, 20)
    for steps in (0, 1, 2, 3, 100):
        owed = made + 5 + math.floor(Fraction(steps, 3))
        assert after.due(start + steps, owed - 1)
        assert not after.due(start + steps, owed)
