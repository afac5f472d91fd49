"""Checkpoint files go to the disk as they are made, and a disk that fails is an ``OSError``."""

import errno
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtrl_lightning.data.run_io import RunIO
from tests.helpers.replay import files_of_at_most

MEBIBYTE = 1 << 20
IO = RunIO(SimpleNamespace(folder=Path("unused")))
STATE = {"mtrl_lightning": {}}
"""Of an algorithm that was trained without a data module."""
CHECKPOINT = {**STATE, "weights": torch.arange(8 * MEBIBYTE // 4), "bias": torch.ones(3), "step": 7}


def test_a_checkpoint_is_not_in_memory_twice_while_it_is_written(tmp_path):
    tracemalloc.start()
    try:
        IO.save_checkpoint(CHECKPOINT, tmp_path / "a.ckpt")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEBIBYTE
    read = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert read["step"] == 7 and torch.equal(read["weights"], CHECKPOINT["weights"])


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no limit on a file's size")
@pytest.mark.parametrize("limit", [0, 5_000, 8 * MEBIBYTE + 500])
def test_a_full_disk_is_an_os_error_and_leaves_the_previous_file(tmp_path, limit):
    path = tmp_path / "a.ckpt"
    IO.save_checkpoint({**STATE, "step": 1}, path)
    with pytest.raises(OSError) as error, files_of_at_most(limit):
        IO.save_checkpoint(CHECKPOINT, path)
    assert error.value.errno == errno.EFBIG
    assert torch.load(path, weights_only=True)["step"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]
