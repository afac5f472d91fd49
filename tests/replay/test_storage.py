"""Rings in memory and in files: types, sizes and limits; ``test_state_machine.py`` has the rest."""

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
from mtrl_lightning.replay import ReplaySnapshots
from tests.helpers.replay import ROW_BYTES, TENSORS, assert_same_columns, make_rings, newest


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(np.float64, torch.float32), (np.float32, torch.float32), (np.uint8, torch.uint8)],
)
def test_columns_keep_values_and_types_in_memory_and_files(tmp_path, dtype, stored):
    number_N2 = np.random.default_rng(0).integers(0, 256, (6, 2, 2, 3))
    given = {
        "observation": number_N2[:, 0].astype(dtype) / (1 if dtype is np.uint8 else 7),
        "action": np.arange(12.0).reshape(6, 2) / 3,
        "reward": np.arange(6.0) / 7,
        "next_observation": number_N2[:, 1].astype(dtype),
        "terminated": np.arange(6) % 3 == 0,
    }
    options = {"dtype": dtype, "shape": (2, 3)}
    plain, restored = (make_rings(1, 4, **options) for _ in range(2))
    mapped = make_rings(1, 4, tmp_path, **options)
    tensors = make_rings(1, 4, device=TENSORS, **options)
    for storage in (plain, mapped, tensors):
        for half in (slice(0, 3), slice(3, 6)):
            columns = {name: column[half] for name, column in given.items()}
            storage.add(np.zeros(3, np.int64), columns)
    snapshots = ReplaySnapshots(tmp_path / "replay")
    snapshots.load(snapshots.save(mapped), restored)
    types = {name: torch.float32 for name in given} | {"terminated": torch.bool}
    types |= dict.fromkeys(("observation", "next_observation"), stored)
    expected = {name: torch.tensor(column[2:]).to(types[name]) for name, column in given.items()}
    for storage in (plain, mapped, tensors, restored):
        assert_same_columns(newest(storage, 0), expected)


@pytest.mark.parametrize("is_mapped", [False, True])
def test_too_large_a_replay_is_refused_before_allocation(tmp_path, monkeypatch, is_mapped):
    free = 1_000 * ROW_BYTES
    memory, disk = (0, free) if is_mapped else (free, 0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=disk))
    folder = tmp_path if is_mapped else None
    with monkeypatch.context() as patched:
        for owner, name in ((torch, "empty"), (torch, "zeros"), (tempfile, "TemporaryFile")):
            patched.setattr(owner, name, lambda *args, **kwargs: pytest.fail("room was taken"))
        with pytest.raises(ConfigurationError, match="at most 1,000"):
            make_rings(2, 1_000, folder)
    assert make_rings(2, 500, folder).capacity == 500


def test_full_disk_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        make_rings(1, 10, tmp_path)
    assert list(tmp_path.iterdir()) == []
