"""Files of offline W&B runs that were cut short, or that W&B has not written."""

import json
import struct

import numpy as np
import pytest

from mtrl_lightning.callbacks.loggers.wandb_files import read_offline_runs, records
from mtrl_lightning.errors import ConfigurationError

pytest.importorskip("wandb", reason="W&B is not installed")

from wandb.proto import wandb_internal_pb2 as protocol

WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def file_of(folder, *parts):
    """Write a file from kinds and contents of parts, and return its path."""
    path = folder / "wandb" / "offline-run-1" / "run-a.wandb"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [struct.pack("<IHB", 0, len(data), kind) + data for kind, data in parts]
    path.write_bytes(b":W&B\0\0\0" + b"".join(written))
    return path


def row(**values):
    record = protocol.Record()
    for name, value in values.items():
        item = record.history.item.add()
        item.key = name
        item.value_json = value if isinstance(value, str) else json.dumps(value)
    return record.SerializeToString()


def test_parts_are_joined_and_one_without_its_end_is_left_out(tmp_path):
    parts = [(WHOLE, b"a"), (FIRST, b"b"), (MIDDLE, b"c"), (LAST, b"d"), (FIRST, b"lost")]
    path = file_of(tmp_path, *parts, (WHOLE, b"e"), (FIRST, b"f"), (LAST, b"g"), (FIRST, b"h"))
    assert list(records(path)) == [b"a", b"bcd", b"e", b"fg"]
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        found = list(records(path))
        assert found == [b"a", b"bcd", b"e", b"fg"][: len(found)]


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff", row(a="["), row(a="[" * 50_000), row(a="1" * 5_000)],
    ids=["no record", "no JSON", "many levels", "many digits"],
)
def test_a_damaged_record_is_named(tmp_path, data):
    path = file_of(tmp_path, (WHOLE, row(a=1)), (WHOLE, data))
    with pytest.raises(ConfigurationError, match=f"{path} is damaged .*metrics.csv has all rows"):
        read_offline_runs(tmp_path)


def test_changed_bytes_change_rows_or_are_named(tmp_path):
    path = file_of(tmp_path, *[(WHOLE, row(env_steps=step, a=0.5)) for step in range(20)])
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(content)
        for place in generator.integers(len(content), size=3):
            changed[place] = generator.integers(256)
        path.write_bytes(changed)
        try:
            rows = read_offline_runs(tmp_path)["a"].rows
        except ConfigurationError:
            continue
        assert len(rows) <= 20
