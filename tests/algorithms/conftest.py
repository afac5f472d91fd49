"""Fixtures of the algorithms' tests."""

import pytest

from tests.helpers.meta import use_meta_as_gpu


@pytest.fixture
def without_numbers(monkeypatch):
    use_meta_as_gpu(monkeypatch)
