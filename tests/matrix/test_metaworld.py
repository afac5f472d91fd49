"""Every network and every gradient method on MetaWorld tasks, in both precisions.

All pairs are in ``test_toy.py``.
"""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.helpers.command_line import config_args
from tests.helpers.matrix import CROSSED, GRADIENTS, NEEDS_SHARED, build, check_updates

PAIRS = list(zip(CROSSED, cycle(GRADIENTS), strict=False))


@pytest.mark.parametrize(("network", "gradient"), PAIRS)
def test_it_updates_in_both_precisions(command_line, monkeypatch, capsys, network, gradient):
    config = config_args(f"gradient/{gradient}")
    if network == "separate" and gradient in NEEDS_SHARED:
        with pytest.raises(SystemExit):
            build(command_line, monkeypatch, "metaworld", network, *config)
        assert "share no parameter" in capsys.readouterr().err
    else:
        built = build(command_line, monkeypatch, "metaworld", network, *config)
        check_updates(built, "metaworld", gradient)


def test_one_pair_is_refused():
    assert [g for n, g in PAIRS if n == "separate" and g in NEEDS_SHARED]


def test_every_gradient_method_is_among_them():
    assert {gradient for _, gradient in PAIRS} == {*GRADIENTS}
