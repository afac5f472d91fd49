"""The replay on disk: exact, incremental, immutable, checked."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.spec import Field
from mtrl_lightning.transitions import STORED
from tests.helpers.replay import (
    assert_same_columns,
    columns_of,
    encode,
    held,
    make_fields,
    make_rings,
)

NUM_RINGS, CAPACITY = 3, 8


def make_storage(num_rings=NUM_RINGS, capacity=CAPACITY):
    return make_rings(num_rings, capacity)


def add(storage, ring, ids):
    storage.add(np.full(len(ids), ring, np.int64), encode(ids))


def files(folder):
    return {path.name for path in folder.iterdir()}


def names(manifest):
    return [chunk["file"] for chunk in manifest["all_ranks"]["chunks"]]


def restored(folder, manifest, num_rings=NUM_RINGS, capacity=CAPACITY):
    storage = make_storage(num_rings, capacity)
    ReplaySnapshots(folder).load(manifest, storage)
    return storage


def assert_equal(found, wanted):
    assert held(found) == held(wanted)
    assert found.added_E.tolist() == wanted.added_E.tolist()
    assert found.size_E.tolist() == wanted.size_E.tolist()


@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_other_types_of_observations_are_restored(tmp_path, dtype):
    storage, loaded = (make_rings(1, 4, dtype=dtype, shape=(2, 3)) for _ in range(2))
    values = np.random.default_rng(0).integers(0, 256, (6, 3, 2, 3)).astype(dtype) / (
        1 if dtype is np.uint8 else 7
    )
    for observation in values.astype(dtype):
        rows = columns_of(
            observation,
            np.ones((3, 2)) / 3,
            np.ones(3) / 7,
            observation[::-1].copy(),
            np.array([True, False, True]),
        )
        storage.add(np.zeros(3, np.int64), rows)
    ReplaySnapshots(tmp_path).load(ReplaySnapshots(tmp_path).save(storage), loaded)
    found, wanted = (each.take(*each.numbers(0, 14, 18)) for each in (loaded, storage))
    assert_same_columns(found, wanted)


def rows_in(path: Path) -> int:
    return len(fields_in(path)["reward"])


def fields_in(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file:
        found = {field: np.load(file, allow_pickle=False) for field in STORED}
        assert file.read() == b""
    return found


def test_a_save_writes_only_the_rows_that_are_new(tmp_path):
    storage, snapshots = make_storage(1, 50_000), ReplaySnapshots(tmp_path)
    add(storage, 0, range(40_000))
    first = snapshots.save(storage)
    add(storage, 0, range(40_000, 41_000))
    second = snapshots.save(storage)
    assert names(second)[:-1] == names(first)
    big, small = (tmp_path / name for name in names(second))
    assert (rows_in(big), rows_in(small)) == (40_000, 1_000)
    overhead = 2_000  # bytes of the headers of five arrays
    for path, rows in ((big, 40_000), (small, 1_000)):
        assert 0 <= path.stat().st_size - bytes_needed(make_fields(), rows) < overhead


def test_a_save_without_new_rows_writes_nothing(tmp_path):
    storage, snapshots = make_storage(), ReplaySnapshots(tmp_path)
    add(storage, 1, range(5))
    first = snapshots.save(storage)
    before = files(tmp_path)
    assert snapshots.save(storage) == first
    assert files(tmp_path) == before


def test_files_are_never_touched_again(tmp_path):
    storage, snapshots = make_storage(), ReplaySnapshots(tmp_path)
    seen = {}
    for step in range(30):
        add(storage, step % NUM_RINGS, range(3 * step, 3 * step + 1 + step % 3))
        snapshots.save(storage)
        for path in tmp_path.iterdir():
            now = (path.stat().st_mtime_ns, path.stat().st_ino, path.read_bytes())
            assert seen.setdefault(path.name, now) == now
    assert len(seen) > 20


def types_in(value):
    if isinstance(value, dict):
        return {dict, *map(type, value)}.union(*(types_in(item) for item in value.values()))
    if isinstance(value, list):
        return {list}.union(*(types_in(item) for item in value))
    return {type(value)}


def test_manifest_is_plain_and_survives_a_checkpoint(tmp_path):
    storage, snapshots = make_storage(), ReplaySnapshots(tmp_path / "replay")
    for start in (0, 3, 6):
        add(storage, 1, range(start, start + 3))
        manifest = snapshots.save(storage)
    assert types_in(manifest) == {dict, list, str, int}
    torch.save({"replay": manifest}, tmp_path / "checkpoint")
    read = torch.load(tmp_path / "checkpoint", weights_only=True)["replay"]
    assert read == manifest
    assert_equal(restored(tmp_path / "replay", read), storage)


def test_the_checksum_is_that_of_the_file(tmp_path):
    storage, snapshots = make_storage(), ReplaySnapshots(tmp_path)
    add(storage, 0, [5, 6])
    (chunk,) = snapshots.save(storage)["all_ranks"]["chunks"]
    assert chunk["crc32"] == zlib.crc32((tmp_path / chunk["file"]).read_bytes())


def saves(folder, count=4):
    """Save a ring of four rows after each three rows; return the manifests and contents."""
    storage, snapshots = make_storage(1, 4), ReplaySnapshots(folder)
    manifests, contents = [], []
    for start in range(0, 3 * count, 3):
        add(storage, 0, range(start, start + 3))
        manifests.append(snapshots.save(storage))
        contents.append(held(storage))
    return storage, manifests, contents


def test_prune_deletes_exactly_the_files_that_no_manifest_lists(tmp_path):
    _, manifests, contents = saves(tmp_path, count=6)
    (tmp_path / "notes.txt").write_text("not ours")
    kept = [1, 5]
    ReplaySnapshots(tmp_path).prune(manifests[i] for i in kept)
    assert files(tmp_path) == {"notes.txt", *names(manifests[1]), *names(manifests[5])}
    for i in kept:
        assert held(restored(tmp_path, manifests[i], 1, 4)) == contents[i]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (Path.unlink, "missing"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "damaged"),
    ],
)
def test_a_missing_or_altered_file_is_refused(tmp_path, change, word):
    _, manifests, _ = saves(tmp_path)
    path = tmp_path / names(manifests[-1])[-1]
    change(path)
    with pytest.raises(ConfigurationError, match=word):
        restored(tmp_path, manifests[-1], 1, 4)


def test_a_file_that_a_failing_disk_does_not_give_is_named(tmp_path, monkeypatch):
    _, manifests, _ = saves(tmp_path)
    monkeypatch.setattr(
        Path, "open", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("Input/output error"))
    )
    with pytest.raises(ConfigurationError, match=names(manifests[-1])[0]):
        restored(tmp_path, manifests[-1], 1, 4)


def test_load_waits_for_a_file_being_written(tmp_path, monkeypatch):
    storage = make_storage()
    add(storage, 0, [1, 2, 3])
    snapshots = ReplaySnapshots(tmp_path, chunk_mebibytes=1e-9)
    manifest = snapshots.save(storage)
    add(storage, 1, [4])

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(snapshots, "_write_file", fail)
    snapshots.write_full_chunk(storage, wait=False)
    with pytest.raises(OSError, match="no space left"):
        snapshots.load(manifest, make_storage())


@pytest.mark.parametrize(("num_rings", "capacity"), [(2, 8), (4, 8), (3, 7)])
def test_smaller_capacity_or_another_number_of_rings_is_refused(tmp_path, num_rings, capacity):
    storage = make_storage()
    add(storage, 0, range(5))
    manifest = ReplaySnapshots(tmp_path).save(storage)
    with pytest.raises(
        ConfigurationError,
        match=r"data\.capacity",
    ):
        restored(tmp_path, manifest, num_rings, capacity)


def test_larger_replay_takes_the_transitions_of_a_smaller_one(tmp_path):
    storage = make_storage()
    for first in (0, 6):  # more than the capacity
        add(storage, 0, range(first, first + 6))
    manifest = ReplaySnapshots(tmp_path).save(storage)
    assert_equal(restored(tmp_path, manifest, capacity=20), storage)


@pytest.mark.parametrize(
    "options", [{"shape": (4,)}, {"dtype": np.uint8}, {"info_fields": (Field("cost"),)}]
)
def test_another_schema_is_refused_and_nothing_is_restored(tmp_path, options):
    storage = make_storage()
    add(storage, 0, range(5))
    manifest = ReplaySnapshots(tmp_path).save(storage)
    other = make_rings(NUM_RINGS, CAPACITY, **options)
    with pytest.raises(ConfigurationError, match="fields"):
        ReplaySnapshots(tmp_path).load(manifest, other)
    assert other.added_E.tolist() == [0, 0, 0]
