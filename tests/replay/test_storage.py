"""Rings in memory against lists."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay.storage import bytes_needed
from tests.helpers.replay import (
    assert_same_columns,
    columns_of,
    encode,
    ids_of,
    make_fields,
    make_rings,
    newest,
)


def test_more_rows_at_once_than_a_ring_holds_are_refused():
    storage = make_rings(1, 2)
    with pytest.raises(AssertionError, match="more rows at once"):
        storage.add(np.array([0, 0, 0]), encode([0, 1, 2]))


@pytest.mark.parametrize(("first", "end"), [(0, 4), (1, 7), (-1, 3)])
def test_rows_that_are_gone_or_yet_to_come_cannot_be_read(first, end):
    storage = make_rings(1, 5)
    storage.add(np.zeros(5, np.int64), encode(range(5)))
    storage.add(np.zeros(1, np.int64), encode([5]))
    with pytest.raises(AssertionError):
        storage.take(*storage.numbers(0, first, end))


def test_rows_read_do_not_change_when_overwritten():
    storage = make_rings(1, 2)
    storage.add(np.zeros(2, np.int64), encode([1, 2]))
    rows = newest(storage, 0)
    storage.add(np.zeros(2, np.int64), encode([3, 4]))
    assert ids_of(rows).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("dtype", "stored"), [(np.float64, torch.float32), (np.float32, torch.float32)]
)
def test_floating_point_observations_are_stored_as_float32(dtype, stored):
    storage = make_rings(1, 2, dtype=dtype)
    value = np.full((1, 3), 1 / 3, dtype)
    storage.add(
        np.zeros(1, np.int64),
        columns_of(value, np.zeros((1, 2)), np.zeros(1), value, np.zeros(1, bool)),
    )
    rows = newest(storage, 0)
    assert rows["observation"].dtype == rows["next_observation"].dtype == stored
    assert rows["observation"].numpy().tolist() == value.astype(np.float32).tolist()


def test_pixels_stay_bytes():
    storage = make_rings(1, 2, dtype=np.uint8, shape=(3, 4, 4))
    pixels = np.arange(48, dtype=np.uint8).reshape(1, 3, 4, 4) + 200
    storage.add(
        np.zeros(1, np.int64),
        columns_of(pixels, np.zeros((1, 2)), np.zeros(1), 255 - pixels, np.ones(1, bool)),
    )
    rows = newest(storage, 0)
    assert rows["observation"].dtype == rows["next_observation"].dtype == torch.uint8
    assert np.array_equal(rows["observation"].numpy(), pixels)
    assert np.array_equal(rows["next_observation"].numpy(), 255 - pixels)


def test_bytes_needed_by_hand():
    # 2 observations of 3 floats, 2 actions, 1 reward, 1 byte of termination
    assert bytes_needed(make_fields(), 10) == 10 * (2 * 3 * 4 + 2 * 4 + 4 + 1)
    assert bytes_needed(make_fields(dtype=np.float64), 1) == 2 * 3 * 4 + 2 * 4 + 4 + 1
    assert bytes_needed(make_fields(dtype=np.uint8, shape=(9, 84, 84)), 2) == 2 * (
        2 * 9 * 84 * 84 + 2 * 4 + 4 + 1
    )


@pytest.mark.parametrize(
    ("dtype", "shape"), [(np.float32, (3,)), (np.float64, (5,)), (np.uint8, (3, 8, 8))]
)
def test_bytes_needed_is_what_is_taken(monkeypatch, dtype, shape):
    taken = []
    empty = torch.empty

    def spy(*args, **kwargs):
        made = empty(*args, **kwargs)
        taken.append(made.numel() * made.element_size())
        return made

    monkeypatch.setattr(torch, "empty", spy)
    make_rings(3, 17, dtype=dtype, shape=shape)
    assert sum(taken) == bytes_needed(make_fields(dtype=dtype, shape=shape), 3 * 17)


def test_too_large_a_replay_is_refused_before_memory_is_taken(monkeypatch):
    free = bytes_needed(make_fields(), 1_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *args, **kwargs: pytest.fail("memory was taken"))
        patched.setattr(torch, "zeros", lambda *args, **kwargs: pytest.fail("memory was taken"))
        with pytest.raises(ConfigurationError, match="2,000 transitions"):
            make_rings(2, 1_000)
    assert make_rings(2, 500).capacity == 500


# ---- mapped from a file ----


@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_other_types_are_kept_in_a_file_too(tmp_path, dtype):
    storages = [make_rings(1, 4, folder, dtype=dtype, shape=(2, 3)) for folder in (tmp_path, None)]
    values = np.random.default_rng(0).integers(0, 256, (3, 2, 3)).astype(dtype)
    for storage in storages:
        storage.add(
            np.zeros(3, np.int64),
            columns_of(values, np.ones((3, 2)), np.ones(3), values[::-1].copy(), np.eye(3)[0] > 0),
        )
    mapped, plain = (newest(storage, 0) for storage in storages)
    assert_same_columns(mapped, plain)


def test_too_large_a_file_is_refused_before_allocation(tmp_path, monkeypatch):
    free = bytes_needed(make_fields(), 1_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: SimpleNamespace(free=free if folder == tmp_path else 0)
    )
    with monkeypatch.context() as patched:
        patched.setattr(
            tempfile, "TemporaryFile", lambda *args, **kwargs: pytest.fail("disk was taken")
        )
        with pytest.raises(
            ConfigurationError,
            match=f"{tmp_path}",
        ):
            make_rings(2, 1_000, tmp_path)
    assert make_rings(2, 500, tmp_path).capacity == 500, "memory is not asked for"


def test_full_disk_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        make_rings(1, 10, tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- rows that were never restored ----


def test_rows_that_were_never_restored_cannot_be_read():
    storage = make_rings(1, 8)
    storage.added_E[:], storage.oldest_E[:] = 7, 5
    storage.numbers(0, 5, 7)
    with pytest.raises(AssertionError):
        storage.numbers(0, 4, 7)
