"""Schedules against exact arithmetic."""

import math
from fractions import Fraction

import pytest

from mtrl_lightning.schedules import Every, UpdateRatio, round_up
from tests.helpers.properties import given, st

STEPS = st.lists(st.integers(0, 400), min_size=1, max_size=30).map(sorted)
RATIOS = st.sampled_from(
    [Fraction(1, 10), Fraction(1, 3), Fraction(29, 100), Fraction(1, 2), Fraction(1), Fraction(2)]
)


@given(interval=st.integers(1, 60), later=st.integers(1, 60), steps=STEPS, cut=st.integers(0, 30))
def test_every_is_due_at_the_first_step_past_a_multiple(interval, later, steps, cut):
    """Also with the interval of a run that is resumed before step number ``cut``."""
    every, previous = Every(interval), 0
    for number, step in enumerate(steps):
        if number == cut:
            resumed = Every(later)
            resumed.load_state_dict(every.state_dict())
            every = resumed
        multiples = [k for k in range(previous + 1, step + 1) if k % every.interval == 0]
        assert every(step) == bool(multiples)
        previous = step


@given(
    exact=RATIOS,
    burst=st.integers(0, 1500),
    start=st.tuples(st.integers(0, 1000), st.integers(0, 50)),
    steps=st.integers(0, 10_000) | st.integers(9_999_990, 10_000_010),
    is_restored=st.booleans(),
)
def test_updates_due_are_exact(exact, burst, start, steps, is_restored):
    schedule = UpdateRatio(float(exact), burst)
    schedule.restart(7, 7)
    assert not schedule.has_started and schedule.state_dict() == {}, "only start begins to count"
    schedule.start(*start)
    schedule.start(5000, 99)  # without effect
    if is_restored:
        state = schedule.state_dict()
        schedule = UpdateRatio(float(exact), burst)
        schedule.load_state_dict(state)
    vector_steps, made = start[0] + steps, start[1] + burst + math.floor(steps * exact)
    assert not schedule.due(vector_steps, made)
    assert made == start[1] or schedule.due(vector_steps, made - 1)
    # after a restart no update is due for earlier steps, and there is no second burst
    schedule.restart(vector_steps, made)
    assert not schedule.due(vector_steps, made)
    further = math.ceil(1 / exact)
    assert schedule.due(vector_steps + further, made)
    assert not schedule.due(vector_steps + further, made + math.floor(further * exact))


@pytest.mark.parametrize(
    ("number", "rounded"), [(1, 1), (7, 7), (11, 15), (15, 15), (16, 20), (21, 30), (1234, 1500)]
)
def test_round_up(number, rounded):
    assert round_up(number) == rounded
