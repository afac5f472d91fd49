"""Files of offline W&B runs that were cut short, or that W&B has not written."""

import struct

import pytest

from tests.helpers.wandb_files import records

pytest.importorskip("wandb", reason="W&B is not installed")


WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def file_of(folder, *parts):
    """Write a file from kinds and contents of parts, and return its path."""
    path = folder / "wandb" / "offline-run-1" / "run-a.wandb"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [struct.pack("<IHB", 0, len(data), kind) + data for kind, data in parts]
    path.write_bytes(b":W&B\0\0\0" + b"".join(written))
    return path


def test_parts_are_joined_and_one_without_its_end_is_left_out(tmp_path):
    parts = [(WHOLE, b"a"), (FIRST, b"b"), (MIDDLE, b"c"), (LAST, b"d"), (FIRST, b"lost")]
    path = file_of(tmp_path, *parts, (WHOLE, b"e"), (FIRST, b"f"), (LAST, b"g"), (FIRST, b"h"))
    assert list(records(path)) == [b"a", b"bcd", b"e", b"fg"]
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        found = list(records(path))
        assert found == [b"a", b"bcd", b"e", b"fg"][: len(found)]
