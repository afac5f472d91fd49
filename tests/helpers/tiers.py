"""Which parameters of a test run every time, and which run with ``-m slow``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

METAWORLD_TASKS = (
    "reach-v3",
    "drawer-close-v3",
    "peg-insert-side-v3",
    "door-open-v3",
    "basketball-v3",
    "window-close-v3",
)
"""Tasks whose rewards together use gripping, pulling, pushing and caging."""
DM_CONTROL_TASKS = (
    "cartpole-swingup",
    "cheetah-run",
    "finger-turn_hard",
    "quadruped-walk",
    "reacher-easy",
    "walker-run",
)
"""Tasks of six bodies."""


def slow_unless(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Mark parameters as slow but for some.

    Args:
        fast: the values that run every time.
        values: all values of a parameter.
    """
    return [
        value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
