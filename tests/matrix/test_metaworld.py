"""Networks and gradient methods on MetaWorld tasks; all pairs are in ``test_toy.py``."""

from __future__ import annotations

import pytest

from tests.helpers.command_line import config_args
from tests.helpers.matrix import (
    PRECISIONS,
    build,
    check_precisions,
    check_update,
    in_precision,
)
from tests.helpers.tiers import slow_unless

FAST = [("care", "pcgrad"), ("multi_head", "cagrad_fast")]
PAIRS = [*FAST, ("language", "nash_mtl"), ("mixture_attention", "aligned_mtl"), ("paco", "famo")]


@pytest.mark.parametrize("pair", slow_unless(FAST, PAIRS), ids="-".join)
def test_it_updates_in_both_precisions(command_line, monkeypatch, pair):
    network, gradient = pair
    config = config_args(f"gradient/{gradient}")
    built = build(command_line, monkeypatch, "metaworld", network, *config)
    steps = [check_update(in_precision(built, one), "metaworld", gradient) for one in PRECISIONS]
    check_precisions(steps)


def test_method_for_shared_parameters_is_refused_without_any(command_line, monkeypatch, capsys):
    config = config_args("gradient/pcgrad")
    with pytest.raises(SystemExit):
        build(command_line, monkeypatch, "toy", "separate", *config)
    assert "share no parameter" in capsys.readouterr().err
