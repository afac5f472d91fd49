"""Fixtures of the algorithms' tests."""

import pytest

from tests.helpers.meta import meta_as_gpu


@pytest.fixture
def without_numbers():
    with meta_as_gpu():
        yield
