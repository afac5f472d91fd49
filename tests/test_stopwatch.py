"""The stopwatch."""

from __future__ import annotations

import time

import pytest

from mtrl_lightning.utils.counters import Stopwatch


def test_stopwatch_adds_up_what_has_the_same_name(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stopwatch = Stopwatch()
    for seconds in (1.0, 2.5):
        with stopwatch.measure("act"):
            now[0] += seconds
        now[0] += 10
    with pytest.raises(RuntimeError), stopwatch.measure("act"):
        now[0] += 1.0
        raise RuntimeError
    stopwatch.start("step")
    now[0] += 1.0
    with stopwatch.measure("update"):  # while it steps
        now[0] += 2.0
    # a running measurement counts at its end
    assert stopwatch.drain() == {"act": 4.5, "update": 2.0}
    now[0] += 1.0
    stopwatch.stop("step")
    assert stopwatch.drain() == {"step": 4.0}
