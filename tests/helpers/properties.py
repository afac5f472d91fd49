"""Hypothesis, with the same examples in each run and no time limit for an example."""

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")

__all__ = ["given", "settings", "st"]
