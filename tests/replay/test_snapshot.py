"""The replay on disk: exact, incremental, immutable, checked, and written ahead."""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplayBuffer, ReplaySnapshots
from mtrl_lightning.replay.storage import bytes_needed
from mtrl_lightning.spec import Field
from mtrl_lightning.transitions import STORED
from tests.helpers.replay import (
    assert_same_batch,
    assert_same_columns,
    columns_of,
    encode,
    files_of_at_most,
    held,
    ids_of,
    make_fields,
    make_rings,
    make_snapshots,
    make_spec,
    make_transitions,
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


def listed(manifest):
    return set(names(manifest))


def add_to_all(storage, first, number):
    """Add ``number`` rows to each ring; those of ring ``r`` are numbered from ``10,000 r``."""
    for row in range(first, first + number):
        rings = np.arange(storage.num_envs)
        storage.add(rings, encode((10_000 * rings + row).tolist()))


def rows_of(chunk):
    return (np.array(chunk["end"]) - chunk["first"]).tolist()


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


# ---- the size of a chunk ----


@pytest.mark.parametrize(
    ("chunk_rows", "sizes"),
    [
        (1, [1] * 7),
        (3, [1] * 7),
        (6, [2, 2, 2, 1]),
        (8, [2, 2, 2, 1]),
        (9, [3, 3, 1]),
        (20, [6, 1]),
        (21, [7]),
        (99, [7]),
    ],
)
def test_chunks_hold_the_rows_asked_for(tmp_path, chunk_rows, sizes):
    storage = make_storage()
    add_to_all(storage, 0, 7)
    manifest = make_snapshots(tmp_path, chunk_rows).save(storage)
    assert [rows_of(chunk) for chunk in manifest["all_ranks"]["chunks"]] == [
        [size] * 3 for size in sizes
    ]
    assert held(restored(tmp_path, manifest)) == held(storage)


def test_a_chunk_has_the_size_asked_for_and_one_row_at_least(tmp_path):
    storage = make_storage(1, 60_000)
    add(storage, 0, range(60_000))
    manifest = ReplaySnapshots(tmp_path / "large", chunk_mebibytes=0.5).save(storage)
    sizes = [
        (tmp_path / "large" / chunk["file"]).stat().st_size
        for chunk in manifest["all_ranks"]["chunks"]
    ]
    headers = 2_000  # bytes, of five arrays
    assert len(sizes) == 5
    assert all(2**19 - 37 < size < 2**19 + headers for size in sizes[:-1])
    small = make_storage(1, 4)
    add(small, 0, range(4))
    manifest = ReplaySnapshots(tmp_path / "small", chunk_mebibytes=1e-9).save(small)
    assert [rows_of(chunk) for chunk in manifest["all_ranks"]["chunks"]] == [[1]] * 4


# ---- writing ahead ----


def test_one_chunk_is_written_ahead_once_it_is_full(tmp_path):
    storage = make_storage(capacity=20)
    snapshots = make_snapshots(tmp_path / "replay", chunk_rows=12)
    assert not snapshots.write_full_chunk(storage)
    add_to_all(storage, 0, 3)
    assert not snapshots.write_full_chunk(storage)
    assert not (tmp_path / "replay").exists()
    add_to_all(storage, 3, 1)
    assert snapshots.write_full_chunk(storage)
    assert not snapshots.write_full_chunk(storage)
    add_to_all(storage, 4, 9)
    assert [snapshots.write_full_chunk(storage) for _ in range(4)] == [True, True, False, False], (
        "one at a time"
    )
    before = files(tmp_path / "replay")
    assert len(before) == 3
    manifest = snapshots.save(storage)
    (last,) = listed(manifest) - before
    assert [rows_of(chunk) for chunk in manifest["all_ranks"]["chunks"]] == [[4] * 3] * 3 + [
        [1] * 3
    ]
    assert manifest["all_ranks"]["chunks"][-1]["file"] == last
    assert held(restored(tmp_path / "replay", manifest, capacity=20)) == held(storage)


def test_prune_keeps_what_was_written_ahead_for_the_next_save(tmp_path):
    storage, snapshots = make_storage(capacity=20), make_snapshots(tmp_path, chunk_rows=6)
    add_to_all(storage, 0, 4)
    first = snapshots.save(storage)
    add_to_all(storage, 4, 4)
    assert snapshots.write_full_chunk(storage)
    before = files(tmp_path)
    (tmp_path / "rows_0_000000000012_000000000024.unfinished").write_bytes(
        b"left by a run that was killed"
    )
    (tmp_path / "rows_0_000000000000_000000000024_0123abcd.npy").write_bytes(
        b"of a run that is over"
    )
    snapshots.prune([first])
    assert files(tmp_path) == before
    snapshots.prune([])
    assert files(tmp_path) == before, "they are all needed by the next save"
    second = snapshots.save(storage)
    snapshots.prune([second])
    assert files(tmp_path) == listed(second)
    assert held(restored(tmp_path, second, capacity=20)) == held(storage)


class SlowDisk:
    """A disk whose writes finish on request, and may then fail because it is full."""

    def __init__(self, monkeypatch):
        self.is_done = threading.Event()
        self.is_full = False
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor):
        assert threading.current_thread() is not threading.main_thread()
        assert self.is_done.wait(timeout=30)
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def slow_disk(monkeypatch):
    return SlowDisk(monkeypatch)


def chunk_files(folder):
    return {name for name in files(folder) if name.endswith(".npy")}


def test_stepping_does_not_wait_for_the_disk(tmp_path, slow_disk):
    storage, snapshots = make_storage(capacity=20), make_snapshots(tmp_path, chunk_rows=6)
    add_to_all(storage, 0, 3)
    assert snapshots.write_full_chunk(storage, wait=False)
    assert not snapshots.write_full_chunk(storage, wait=False)
    add_to_all(storage, 3, 1)  # what is written meanwhile does not change
    assert not chunk_files(tmp_path), "it is not on the disk yet"
    threading.Timer(0.2, slow_disk.is_done.set).start()
    manifest = snapshots.save(storage)
    assert listed(manifest) == files(tmp_path)
    assert [rows_of(chunk) for chunk in manifest["all_ranks"]["chunks"]] == [[2] * 3, [2] * 3]
    assert held(restored(tmp_path, manifest, capacity=20)) == held(storage)


@pytest.mark.parametrize("then", ["write_full_chunk", "finish", "save", "prune"])
def test_disk_error_is_raised_later_and_saving_recovers(tmp_path, slow_disk, then):
    storage, snapshots = make_storage(capacity=20), make_snapshots(tmp_path, chunk_rows=6)
    add_to_all(storage, 0, 2)
    slow_disk.is_done.set()
    first = snapshots.save(storage)
    add_to_all(storage, 2, 2)
    slow_disk.is_full = True
    assert snapshots.write_full_chunk(storage, wait=False)
    calls = {
        "write_full_chunk": lambda: snapshots.write_full_chunk(storage),
        "finish": snapshots.finish,
        "save": lambda: snapshots.save(storage),
        "prune": lambda: snapshots.prune([first]),
    }
    with pytest.raises(OSError, match="No space left"):
        calls[then]()
    assert files(tmp_path) == listed(first), "others need the room"
    slow_disk.is_full = False
    second = snapshots.save(storage)
    assert held(restored(tmp_path, second, capacity=20)) == held(storage)


def test_a_chunk_that_is_being_written_is_not_pruned(tmp_path, slow_disk):
    storage, snapshots = make_storage(capacity=20), make_snapshots(tmp_path, chunk_rows=6)
    add_to_all(storage, 0, 2)
    assert snapshots.write_full_chunk(storage, wait=False)
    threading.Timer(0.2, slow_disk.is_done.set).start()
    snapshots.prune([])
    assert listed(snapshots.save(storage)) == files(tmp_path)


# ---- the newest rows only ----


def test_rows_that_were_not_restored_are_never_drawn(tmp_path, monkeypatch):
    first = filled(15, seed=0)
    manifest = ReplaySnapshots(tmp_path, save_last=4).save(first.storage)
    empty = torch.empty

    def marked(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(1)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", marked)
        buffer = ReplayBuffer(make_spec(2), 20)
    ReplaySnapshots(tmp_path, save_last=4).load(manifest, buffer.storage)
    assert len(buffer) == 4
    for step in range(15, 40):
        rows = ids_of(buffer.sample(2_000)).reshape(2, -1) % 1000
        wanted = set(range(max(13, step - 10), step))
        assert set(rows[0].tolist()) == set(rows[1].tolist()) == wanted
        buffer.add(make_transitions([step, 1000 + step], [0, 1]))


# ---- the same batches ----


def filled(rows, seed, folder=None, capacity=20):
    buffer = ReplayBuffer(make_spec(2), capacity, seed, folder=folder)
    for row in range(rows):
        buffer.add(make_transitions([row, 1000 + row], [0, 1]))
    return buffer


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("rows", [1, 10, 25])
def test_batches_after_a_restore_are_uninterrupted(tmp_path, rows, mapped):
    buffer = filled(rows, seed=3)
    for row in range(3):  # unbalanced
        buffer.add(make_transitions([500 + row], [1]))
    buffer.sample(8)
    manifest = make_snapshots(tmp_path / "replay", 7).save(buffer.storage)
    state = buffer.state_dict()
    after = ReplayBuffer(make_spec(2), 20, 99, folder=tmp_path if mapped else None)
    ReplaySnapshots(tmp_path / "replay").load(manifest, after.storage)
    after.load_state_dict(state)
    for step in range(25):
        assert_same_batch(after.sample(16), buffer.sample(16))
        for each in (after, buffer):
            each.add(make_transitions([700 + step, 1700 + step], [0, 1]))


# ---- damage ----


def test_every_single_byte_that_is_changed_is_seen(tmp_path):
    storage, snapshots = make_storage(1, 4), ReplaySnapshots(tmp_path)
    add(storage, 0, [1, 2])
    manifest = snapshots.save(storage)
    path = tmp_path / manifest["all_ranks"]["chunks"][0]["file"]
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(
            content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]
        )
        with pytest.raises(ConfigurationError, match="damaged"):
            snapshots.verify(manifest)
        if place % 40 == 0:
            with pytest.raises(ConfigurationError, match="damaged"):
                restored(tmp_path, manifest, 1, 4)
    path.write_bytes(content)
    snapshots.verify(manifest)
    assert len(content) > 600


@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("damage", ["missing", "cut", "folder"])
def test_verify_names_the_damaged_file(tmp_path, which, damage):
    storage, snapshots = make_storage(), make_snapshots(tmp_path, chunk_rows=6)
    add_to_all(storage, 0, 6)
    manifest = snapshots.save(storage)
    ReplaySnapshots(tmp_path).verify(manifest)
    before = snapshots.save(storage)
    path = tmp_path / manifest["all_ranks"]["chunks"][which]["file"]
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-1])
    if damage == "folder":
        path.mkdir()
    with pytest.raises(ConfigurationError, match=re.escape(str(path))):
        ReplaySnapshots(tmp_path).verify(manifest)
    assert snapshots.save(storage) == before == manifest


# ---- a disk that fails ----


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no limit on a file's size")
def test_a_file_that_may_not_grow_is_an_error_and_no_chunk(tmp_path):
    storage, snapshots = make_storage(1, 500), ReplaySnapshots(tmp_path)
    add(storage, 0, range(10))
    first = snapshots.save(storage)
    add(storage, 0, range(10, 400))
    for limit in (2_000, 3_000):
        with pytest.raises(OSError) as error, files_of_at_most(limit):
            snapshots.save(storage)
        assert error.value.errno == errno.EFBIG
    second = snapshots.save(storage)
    assert held(restored(tmp_path, first, 1, 500)) == [list(range(10))]
    assert held(restored(tmp_path, second, 1, 500)) == [list(range(400))]
    assert files(tmp_path) == listed(second)
