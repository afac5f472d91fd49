"""Every network and every gradient method on MetaWorld tasks, in both precisions.

All pairs are in ``test_toy.py``.
"""

from __future__ import annotations

from itertools import cycle

import pytest

from tests.helpers.command_line import config_args
from tests.helpers.matrix import CROSSED, GRADIENTS, NEEDS_SHARED, build, check_updates
from tests.helpers.tiers import slow_unless

PAIRS = list(zip(CROSSED, cycle(GRADIENTS), strict=False))
FAST = [pair for pair in PAIRS if pair[0] in ("care", "multi_head", "separate")]


@pytest.mark.parametrize("pair", slow_unless(FAST, PAIRS), ids="-".join)
def test_it_updates_in_both_precisions(command_line, monkeypatch, capsys, pair):
    network, gradient = pair
    config = config_args(f"gradient/{gradient}")
    if network == "separate" and gradient in NEEDS_SHARED:
        with pytest.raises(SystemExit):
            build(command_line, monkeypatch, "metaworld", network, *config)
        assert "share no parameter" in capsys.readouterr().err
    else:
        built = build(command_line, monkeypatch, "metaworld", network, *config)
        check_updates(built, "metaworld", gradient)
