"""Every network and every gradient method on MetaWorld tasks, in both precisions.

All pairs are in ``test_toy.py``.
"""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.matrix import CROSSED, GRADIENTS, check_pair

PAIRS = list(zip(CROSSED, cycle(GRADIENTS), strict=False))


@pytest.mark.parametrize(("network", "gradient"), PAIRS)
def test_it_updates_in_both_precisions(command_line, monkeypatch, capsys, network, gradient):
    check_pair(command_line, monkeypatch, capsys, "metaworld", network, gradient)


def test_every_gradient_method_is_among_them():
    assert {gradient for _, gradient in PAIRS} == {*GRADIENTS}
