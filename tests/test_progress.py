"""Bars of progress."""

import io
import sys
import time

import pytest

from mtrl_lightning.utils.progress import POLL_SECONDS, polled_progress_bar, progress_bar


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_shown_on_a_terminal_only(monkeypatch, is_terminal):
    written = io.StringIO()
    written.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", written)
    with progress_bar("working", 10) as bar:
        bar.update(3)
    with polled_progress_bar("waiting", 10, lambda: 4):
        time.sleep(2 * POLL_SECONDS)
    with polled_progress_bar("hidden", 10, lambda: 1 // 0, is_wanted=False):
        pass
    assert ("working" in written.getvalue()) == is_terminal
    assert ("4/10" in written.getvalue()) == is_terminal
    assert "hidden" not in written.getvalue()
