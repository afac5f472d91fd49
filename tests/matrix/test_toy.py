"""Every network with every gradient method on toy tasks, in both precisions."""

from __future__ import annotations

import pytest

from mtrl_lightning.errors import ConfigurationError
from tests.helpers.matrix import (
    CROSSED,
    GRADIENTS,
    NEEDS_SHARED,
    build,
    check_updates,
    with_gradient,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("network", CROSSED)
def test_it_updates_in_both_precisions(command_line, monkeypatch, network):
    built = build(command_line, monkeypatch, "toy", network)  # parsing takes longest
    for gradient in GRADIENTS:
        if network == "separate" and gradient in NEEDS_SHARED:
            with pytest.raises((ConfigurationError, ValueError), match="share no parameter"):
                with_gradient(built, gradient)
        else:
            check_updates(with_gradient(built, gradient), "toy", gradient)
