"""Checkpoint files go to the disk as they are made, and a disk that fails is an ``OSError``."""

from __future__ import annotations

import errno
import io
import sys
import tracemalloc

import pytest
import torch

from mtrl_lightning.run.checkpoint_file import DurableIO
from tests.helpers.replay import files_of_at_most

MEBIBYTE = 1 << 20
CHECKPOINT = {"weights": torch.arange(8 * MEBIBYTE // 4), "bias": torch.ones(3), "step": 7}


def test_a_checkpoint_is_not_in_memory_twice_while_it_is_written(tmp_path):
    tracemalloc.start()
    try:
        DurableIO(None).save_checkpoint(CHECKPOINT, tmp_path / "a.ckpt")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEBIBYTE
    read = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert read["step"] == 7 and torch.equal(read["weights"], CHECKPOINT["weights"])


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no limit on a file's size")
@pytest.mark.parametrize("limit", [0, 100, 5_000, MEBIBYTE, 8 * MEBIBYTE + 500])
def test_a_disk_that_is_full_at_any_place_is_an_os_error(tmp_path, limit):
    with pytest.raises(OSError) as error, files_of_at_most(limit):
        DurableIO(None).save_checkpoint(CHECKPOINT, tmp_path / "a.ckpt")
    assert error.value.errno == errno.EFBIG


def test_each_write_can_be_the_one_that_fails(tmp_path, monkeypatch):
    real, path, writes = open, tmp_path / "a.ckpt", []

    class Disk(io.FileIO):
        fails_at = None

        def write(self, content):
            if len(writes) == self.fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            writes.append(bytes(content))
            return super().write(content)

    def opened(file, *mode, **options):
        return Disk(file, *mode) if file == path else real(file, *mode, **options)

    monkeypatch.setattr("builtins.open", opened)
    DurableIO(None).save_checkpoint({"bias": torch.ones(3)}, path)
    assert path.read_bytes() == b"".join(writes)
    for fails_at in range(len(writes)):
        writes.clear()
        monkeypatch.setattr(Disk, "fails_at", fails_at)
        with pytest.raises(OSError, match="No space left"):
            DurableIO(None).save_checkpoint({"bias": torch.ones(3)}, path)


def test_an_error_that_is_not_the_disks_stays_what_it_is(tmp_path):
    class Broken:
        def __reduce__(self):
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        DurableIO(None).save_checkpoint({"a": Broken()}, tmp_path / "a.ckpt")
