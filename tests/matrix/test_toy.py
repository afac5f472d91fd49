"""Every network with every gradient method on toy tasks, in both precisions."""

from __future__ import annotations

import pytest

from tests.matrix import GRADIENTS, NEEDS_SHARED, NETWORKS, check_updates


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("network", NETWORKS)
def test_it_updates_in_both_precisions(command_line, monkeypatch, capsys, network, gradient):
    if network == "separate" and gradient in NEEDS_SHARED:
        with pytest.raises(SystemExit):
            check_updates(command_line, monkeypatch, "toy", network, gradient)
        assert "share no parameter" in capsys.readouterr().err
    else:
        check_updates(command_line, monkeypatch, "toy", network, gradient)
