"""PyTorch's threads."""

import threading
import time

import pytest
import torch

from mtrl_lightning.threads import in_turn, side_by_side, torch_threads


@pytest.fixture(autouse=True)
def four_threads():
    with torch_threads(4):
        yield


def test_a_number_of_threads_lasts_as_long_as_it_is_asked_for():
    with torch_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 4


def test_two_functions_run_at_once_with_half_of_the_threads_each():
    both_run = threading.Barrier(2, timeout=30)

    def threads():
        both_run.wait()
        return torch.get_num_threads()

    assert side_by_side(threads, threads) == (2, 2)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize("enabled", [True, False])
def test_both_compute_in_the_callers_precision(enabled):
    def product():
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    expected = torch.bfloat16 if enabled else torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled):
        assert side_by_side(product, product) == in_turn(product, product) == (expected, expected)


def test_what_one_raises_is_raised_when_the_other_has_ended():
    ended = []

    def slow():
        time.sleep(0.2)
        ended.append(True)

    def broken():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        side_by_side(broken, slow)
    with pytest.raises(ValueError, match="broken"):
        side_by_side(slow, broken)
    assert ended == [True, True]
    assert torch.get_num_threads() == 4
