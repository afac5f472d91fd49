"""The replay on disk: files of a chosen size, checked, written ahead by a thread, and pruned.

``test_state_machine.py`` shows that what is restored is what was saved.
"""

import errno
import os
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay import ReplaySnapshots
from mtrl_lightning.spec import Field
from tests.helpers.replay import encode, held, make_rings, make_snapshots

NUM_RINGS, CAPACITY = 3, 20


def make_storage():
    return make_rings(NUM_RINGS, CAPACITY)


def add_to_all(storage, first, number):
    """Add ``number`` rows to each ring; those of ring ``r`` are numbered from ``10,000 r``."""
    for row in range(first, first + number):
        rings = np.arange(NUM_RINGS)
        storage.add(rings, encode((10_000 * rings + row).tolist()))


def files(folder):
    return {path.name for path in folder.iterdir()}


def chunks_of(manifest):
    return manifest["all_ranks"]["chunks"]


def listed(manifest):
    return {chunk["file"] for chunk in chunks_of(manifest)}


def sizes_of(manifest):
    """Return the rows of each ring in each chunk."""
    return [(np.array(chunk["end"]) - chunk["first"]).tolist() for chunk in chunks_of(manifest)]


def restored(folder, manifest):
    storage = make_storage()
    ReplaySnapshots(folder).load(manifest, storage)
    return held(storage)


def test_the_newest_rows_are_saved_and_not_written_again(tmp_path):
    storage, other = make_storage(), make_storage()
    add_to_all(storage, 0, 25)
    manifest = ReplaySnapshots(tmp_path, save_last=10).save(storage)
    snapshots = ReplaySnapshots(tmp_path, save_last=10)
    snapshots.load(manifest, other)
    assert held(other) == [ring[-4:] for ring in held(storage)], "10 of three rings, rounded up"
    before = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    assert snapshots.save(other) == manifest
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == before


def test_one_chunk_is_written_ahead_once_it_is_full(tmp_path):
    storage, snapshots = make_storage(), make_snapshots(tmp_path, chunk_rows=12)
    add_to_all(storage, 0, 3)
    assert not snapshots.write_full_chunk(storage)
    add_to_all(storage, 3, 1)
    assert [snapshots.write_full_chunk(storage) for _ in range(2)] == [True, False]
    add_to_all(storage, 4, 9)
    assert [snapshots.write_full_chunk(storage) for _ in range(3)] == [True, True, False]
    assert sizes_of(snapshots.save(storage)) == [[4] * 3] * 3 + [[1] * 3]


def test_prune_deletes_what_other_runs_left_and_no_other_file(tmp_path):
    storage, snapshots = make_storage(), make_snapshots(tmp_path, chunk_rows=6)
    add_to_all(storage, 0, 4)
    manifest = snapshots.save(storage)
    (tmp_path / "notes.txt").write_text("not ours")
    before = files(tmp_path)
    (tmp_path / "rows_0_000000000012_000000000024.unfinished").write_bytes(b"of a killed run")
    (tmp_path / "rows_0_000000000000_000000000024_0123abcd.npy").write_bytes(b"of another run")
    snapshots.prune([])
    assert files(tmp_path) == before == {"notes.txt", *listed(manifest)}


@pytest.fixture
def slow_disk(monkeypatch):
    """Return a disk whose writes finish on request, and may then fail because it is full."""
    disk = SimpleNamespace(is_done=threading.Event(), is_full=False)

    def fsync(descriptor):
        assert threading.current_thread() is not threading.main_thread()
        assert disk.is_done.wait(timeout=30)
        if disk.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    return disk


def test_stepping_does_not_wait_for_the_disk(tmp_path, slow_disk):
    storage, snapshots = make_storage(), make_snapshots(tmp_path, chunk_rows=6)
    add_to_all(storage, 0, 3)
    assert snapshots.write_full_chunk(storage)
    assert not snapshots.write_full_chunk(storage)
    add_to_all(storage, 3, 1)  # what is written meanwhile does not change
    assert not list(tmp_path.glob("*.npy")), "it is not on the disk yet"
    threading.Timer(0.2, slow_disk.is_done.set).start()
    snapshots.prune([])
    manifest = snapshots.save(storage)
    assert listed(manifest) == files(tmp_path)
    assert sizes_of(manifest) == [[2] * 3, [2] * 3]
    assert restored(tmp_path, manifest) == held(storage)


@pytest.mark.parametrize("then", ["finish", "save", "prune", "load"])
def test_disk_error_is_raised_later_and_saving_recovers(tmp_path, slow_disk, then):
    storage, snapshots = make_storage(), make_snapshots(tmp_path, chunk_rows=6)
    add_to_all(storage, 0, 2)
    slow_disk.is_done.set()
    first = snapshots.save(storage)
    add_to_all(storage, 2, 2)
    slow_disk.is_full = True
    assert snapshots.write_full_chunk(storage)
    calls = {
        "finish": snapshots.finish,
        "save": lambda: snapshots.save(storage),
        "prune": lambda: snapshots.prune([first]),
        "load": lambda: snapshots.load(first, make_storage()),
    }
    with pytest.raises(OSError, match="No space left"):
        calls[then]()
    assert files(tmp_path) == listed(first), "others need the room"
    slow_disk.is_full = False
    second = snapshots.save(storage)
    assert restored(tmp_path, second) == held(storage)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_missing_file_is_refused_by_its_name(tmp_path, is_folder):
    storage, snapshots = make_storage(), make_snapshots(tmp_path, chunk_rows=6)
    add_to_all(storage, 0, 6)
    manifest = snapshots.save(storage)
    path = tmp_path / chunks_of(manifest)[2]["file"]
    path.unlink()
    if is_folder:
        path.mkdir()
    with pytest.raises(ConfigurationError, match=re.escape(str(path))):
        snapshots.load(manifest, make_storage())


@pytest.mark.parametrize(
    ("num_rings", "capacity", "options", "word"),
    [
        (2, CAPACITY, {}, "capacity"),
        (3, CAPACITY - 1, {}, "capacity"),
        (3, CAPACITY, {"dtype": np.uint8}, "fields"),
        (3, CAPACITY, {"info_fields": (Field("cost"),)}, "cost"),
    ],
)
def test_another_replay_is_not_filled(tmp_path, num_rings, capacity, options, word):
    storage = make_storage()
    add_to_all(storage, 0, 5)
    manifest = ReplaySnapshots(tmp_path).save(storage)
    other = make_rings(num_rings, capacity, **options)
    with pytest.raises(ConfigurationError, match=word):
        ReplaySnapshots(tmp_path).load(manifest, other)
    assert not other.added_E.any()
