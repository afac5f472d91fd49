"""Rings and their files against lists: additions, saves, full disks and restores in any order."""

from __future__ import annotations

import errno
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np

from tests.helpers.properties import settings, st  # isort: skip
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.helpers.replay import encode, held, make_rings, make_snapshots

PLACE = st.integers(0, 99)
"""Of a saved manifest, modulo their number."""


class ReplayMachine(RuleBasedStateMachine):
    """The rows of each ring are a list of numbers; those of each saved manifest, too."""

    @initialize(
        num_rings=st.integers(1, 3),
        capacity=st.integers(1, 8),
        chunk_rows=st.sampled_from([1, 4, 6, 13, 1000]),
        save_last=st.none() | st.integers(1, 30),
        is_mapped=st.booleans(),
    )
    def start(self, num_rings, capacity, chunk_rows, save_last, is_mapped):
        self.folder = Path(tempfile.mkdtemp())
        self.replay = self.folder / "replay"
        self.num_rings, self.capacity = num_rings, capacity
        self.chunk_rows, self.save_last = chunk_rows, save_last
        self.map_folder = self.folder if is_mapped else None
        self.rings, self.added = [[] for _ in range(num_rings)], [0] * num_rings
        self.next_id = 0
        self.saved = []
        self.storage, self.snapshots = self.fresh()

    def fresh(self):
        storage = make_rings(self.num_rings, self.capacity, self.map_folder)
        return storage, make_snapshots(self.replay, self.chunk_rows, self.save_last)

    @rule(rings=st.lists(st.integers(0, 2), max_size=10))
    def add(self, rings):
        rings = [ring % self.num_rings for ring in rings]
        rings = [r for i, r in enumerate(rings) if rings[:i].count(r) < self.capacity]
        ids = range(self.next_id, self.next_id + len(rings))
        self.next_id += len(rings)
        self.storage.add(np.array(rings, np.int64), encode(ids))
        for ring, number in zip(rings, ids, strict=True):
            self.rings[ring] = [*self.rings[ring], number][-self.capacity :]
            self.added[ring] += 1

    @rule()
    def write_ahead(self):
        self.snapshots.write_full_chunk(self.storage)

    @rule()
    def save(self):
        manifest = self.snapshots.save(self.storage)
        self.snapshots.verify(manifest)
        largest = max(1, self.chunk_rows // self.num_rings)
        for chunk in manifest["all_ranks"]["chunks"]:
            assert (np.array(chunk["end"]) - chunk["first"]).max() <= largest
        share = None if self.save_last is None else -(-self.save_last // self.num_rings)
        rings = [ring if share is None else ring[-share:] for ring in self.rings]
        self.saved.append((manifest, rings, list(self.added)))

    @rule(num_written=st.integers(0, 6))
    def save_on_a_full_disk(self, num_written):
        calls, save = [], np.save

        def full(file, array, **options):
            calls.append(array)
            if len(calls) > num_written:
                file.write(b"half a ")
                raise OSError(errno.ENOSPC, "No space left on device")
            save(file, array, **options)

        with mock.patch.object(np, "save", full), suppress(OSError):
            self.snapshots.save(self.storage)

    @precondition(lambda self: self.saved)
    @rule(kept=st.lists(PLACE, min_size=1, max_size=3))
    def prune(self, kept):
        self.saved = [self.saved[place % len(self.saved)] for place in kept]
        self.snapshots.prune(manifest for manifest, *_ in self.saved)

    @rule()
    def save_and_prune(self):
        self.save()
        self.saved = self.saved[-1:]
        ((manifest, *_),) = self.saved
        self.snapshots.prune([manifest])
        names = {chunk["file"] for chunk in manifest["all_ranks"]["chunks"]}
        found = self.replay.iterdir() if self.replay.exists() else ()
        assert {path.name for path in found} == names

    @precondition(lambda self: self.saved)
    @rule(place=PLACE, continues=st.booleans())
    def restore(self, place, continues):
        manifest, rings, added = self.saved[place % len(self.saved)]
        storage, snapshots = self.fresh()
        snapshots.load(manifest, storage)
        assert held(storage) == rings
        assert storage.added_E.tolist() == added
        if continues:
            self.storage, self.snapshots = storage, snapshots
            self.rings, self.added = [list(ring) for ring in rings], list(added)

    @invariant()
    def holds_the_newest_rows(self):
        if not hasattr(self, "storage"):
            return
        assert held(self.storage) == self.rings
        assert self.storage.added_E.tolist() == self.added
        assert self.storage.size_E.tolist() == [len(ring) for ring in self.rings]
        assert self.map_folder is None or {p.name for p in self.folder.iterdir()} <= {"replay"}

    def teardown(self):
        if hasattr(self, "folder"):
            self.snapshots.finish()
            shutil.rmtree(self.folder)


TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(max_examples=20, stateful_step_count=40)
