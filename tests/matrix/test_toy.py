"""Every network with every gradient method on toy tasks, in both precisions."""

from __future__ import annotations

import pytest

from tests.matrix import CROSSED, GRADIENTS, check_pair


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("network", CROSSED)
def test_it_updates_in_both_precisions(command_line, monkeypatch, capsys, network, gradient):
    check_pair(command_line, monkeypatch, capsys, "toy", network, gradient)
