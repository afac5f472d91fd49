"""Fixtures of the algorithms' tests."""

import pytest

from benchmarks.updates import meta_as_gpu
from mtrl_lightning.gradients import cagrad, fairgrad


@pytest.fixture
def without_numbers(monkeypatch):
    for module in (cagrad, fairgrad):
        monkeypatch.setattr(module, "NUM_STEPS", 2)  # all steps make the same operations
    with meta_as_gpu():
        yield
