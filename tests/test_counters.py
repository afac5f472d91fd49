"""Counters and the stopwatch."""

from __future__ import annotations

import time

import pytest

from mtrl_lightning.utils.counters import Counters, Stopwatch


def test_counters_are_restored_and_stay_plain_integers():
    before = Counters(40, 4, 3, 2, worker_restarts=5, dropped_transitions=6, skipped_updates=7)
    after = Counters(updates=99)
    after.load_state_dict(before.state_dict())
    assert after == before
    assert {type(value) for value in after.state_dict().values()} == {int}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_stopwatch_adds_up_what_has_the_same_name(clock):
    stopwatch = Stopwatch()
    for seconds in (1.0, 2.5):
        with stopwatch.measure("act"):
            clock[0] += seconds
        clock[0] += 10
    with stopwatch.measure("step"):
        clock[0] += 4.0
    assert stopwatch.drain() == {"act": 3.5, "step": 4.0}


def test_stopwatch_measures_what_overlaps(clock):
    stopwatch = Stopwatch()
    stopwatch.start("step")
    clock[0] += 1.0
    with stopwatch.measure("update"):
        clock[0] += 2.0
    stopwatch.stop("step")
    assert stopwatch.drain() == {"step": 3.0, "update": 2.0}


def test_stopwatch_counts_a_running_measurement_at_its_end(clock):
    stopwatch = Stopwatch()
    stopwatch.start("evaluate")
    clock[0] += 1.0
    assert stopwatch.drain() == {}
    clock[0] += 1.0
    stopwatch.stop("evaluate")
    assert stopwatch.drain() == {"evaluate": 2.0}


def test_stopwatch_stops_when_the_block_raises(clock):
    stopwatch = Stopwatch()
    with pytest.raises(RuntimeError), stopwatch.measure("act"):
        clock[0] += 1.0
        raise RuntimeError
    assert stopwatch.drain() == {"act": 1.0}
