"""When ``curves.png`` is drawn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mtrl_lightning.callbacks import CurvesCallback, curves
from mtrl_lightning.reports import budget

pytestmark = pytest.mark.curves


@pytest.fixture
def callback(tmp_path, monkeypatch):
    """The callback of a run that has just begun, with a clock that is set by hand."""
    (tmp_path / "metrics.csv").touch()
    clock = SimpleNamespace(now=0.0, plotted=0)

    def plot(folder):
        clock.now += 0.1
        clock.plotted += 1
        return folder / "curves.png"

    monkeypatch.setattr(budget.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(curves, "plot_curves", plot)
    made = CurvesCallback()
    made.session = SimpleNamespace(folder=tmp_path, loggers=[])
    made.clock = clock
    return made


def evaluate_at(callback, *times):
    plotted = []
    for now in times:
        callback.clock.now = now
        callback.plot_if_affordable()
        plotted.append(callback.clock.plotted)
    return plotted


def test_an_image_is_left_out_where_it_would_take_too_much_of_the_run(callback):
    plotted = evaluate_at(callback, 1.0, 5.0, 19.0, 21.0, 29.0, 31.0)
    assert plotted == [1, 1, 1, 2, 2, 3], "one per cent of the time is one image in ten seconds"


def test_the_last_evaluation_is_drawn_in_any_case_and_once(callback):
    assert evaluate_at(callback, 1.0, 5.0) == [1, 1]
    callback.on_train_end(None, None)
    assert callback.clock.plotted == 2
    assert evaluate_at(callback, 31.0) == [3]
    callback.on_train_end(None, None)
    assert callback.clock.plotted == 3
