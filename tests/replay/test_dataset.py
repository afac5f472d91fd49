"""The stream of batches."""

from __future__ import annotations

from itertools import islice

import torch
from torch.utils.data import DataLoader

from mtrl_lightning.replay import ReplayBuffer, ReplayDataset
from tests.replay import ids_of, make_spec, make_transitions


def make_buffer(num_rows):
    buffer = ReplayBuffer(make_spec(2), capacity=40)
    for row in range(num_rows):
        buffer.add(make_transitions([row, 1000 + row], [0, 1]))
    return buffer


def test_it_has_a_length_that_no_run_reaches():
    assert len(ReplayDataset(make_buffer(1), 4)) >= 10**12


def test_the_batches_are_those_of_the_buffer_and_do_not_end():
    stream = [ids_of(batch).tolist() for batch in islice(ReplayDataset(make_buffer(20), 6), 500)]
    buffer = make_buffer(20)
    assert stream == [ids_of(buffer.sample(6)).tolist() for _ in range(500)]


def test_nothing_is_drawn_before_a_batch_is_asked_for():
    buffer = make_buffer(0)
    stream = iter(ReplayDataset(buffer, 8))  # would raise here if it drew
    buffer.add(make_transitions([7, 1007], [0, 1]))
    assert ids_of(next(stream)).tolist() == [7] * 4 + [1007] * 4


def test_each_batch_knows_what_was_added_just_before():
    buffer = make_buffer(0)
    stream = iter(
        DataLoader(ReplayDataset(buffer, 2_000), batch_size=None, generator=torch.Generator())
    )
    for row in range(15):
        buffer.add(make_transitions([row, 1000 + row], [0, 1]))
        assert set(ids_of(next(stream)).tolist()) == {*range(row + 1), *range(1000, 1001 + row)}


def test_the_time_of_sampling_is_measured(monkeypatch):
    buffer = make_buffer(3)
    next(iter(ReplayDataset(buffer, 2)))
    assert set(buffer.stopwatch.drain()) == {"sample"}
