"""Bars of progress."""

import io
import sys

import pytest

from mtrl_lightning.utils.progress import progress_bar


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_shown_on_a_terminal_only(monkeypatch, is_terminal):
    written = io.StringIO()
    written.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", written)
    with progress_bar("working", 10) as bar:
        bar.update(3)
    with progress_bar("hidden", 10, is_wanted=False) as bar:
        bar.update(4)
    assert ("working" in written.getvalue()) == is_terminal
    assert "hidden" not in written.getvalue()
