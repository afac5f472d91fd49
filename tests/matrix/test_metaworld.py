"""Every network with every gradient method on MetaWorld tasks, in both precisions."""

from __future__ import annotations

import pytest

from tests.matrix import GRADIENTS, NETWORKS, check_pair


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("network", NETWORKS)
def test_it_updates_in_both_precisions(command_line, monkeypatch, capsys, network, gradient):
    check_pair(command_line, monkeypatch, capsys, "metaworld", network, gradient)
