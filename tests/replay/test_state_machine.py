"""A replay and its files against lists: additions, batches, saves, full disks and restores.

They come in any order. Nothing that is sampled or restored may differ from the lists.
"""

import errno
import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

import numpy as np

from tests.helpers.properties import settings, st  # isort: skip
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mtrl_lightning.replay import ReplayBuffer
from tests.helpers.replay import (
    assert_same_batch,
    held,
    ids_of,
    make_snapshots,
    make_spec,
    make_transitions,
)

PLACE = st.integers(0, 99)
"""Of a saved manifest, modulo their number."""
ROWS = 400
"""Of each task in a batch: so many that each of its at most 32 transitions is among them."""


class ReplayMachine(RuleBasedStateMachine):
    """The rows of each ring are a list of numbers; those of each saved manifest, too."""

    @initialize(
        num_rings=st.integers(1, 4),
        num_tasks=st.integers(1, 3),
        capacity=st.integers(1, 8),
        chunk_rows=st.sampled_from([1, 4, 6, 13, 1000]),
        save_last=st.none() | st.integers(1, 30),
        is_mapped=st.booleans(),
    )
    def start(self, num_rings, num_tasks, capacity, chunk_rows, save_last, is_mapped):
        self.folder = Path(tempfile.mkdtemp())
        self.replay = self.folder / "replay"
        self.tasks = [ring % num_tasks for ring in range(num_rings)]
        self.num_tasks = len({*self.tasks})
        self.num_rings, self.capacity = num_rings, capacity
        self.chunk_rows, self.save_last = chunk_rows, save_last
        self.map_folder = self.folder if is_mapped else None
        self.rings, self.added = [[] for _ in range(num_rings)], [0] * num_rings
        self.next_id = 0
        self.saved = []
        self.contents = {}
        self.buffer, self.snapshots = self.fresh()

    def fresh(self, more=0):
        """Return an empty replay, with room for ``more`` in each ring, and not quite one more."""
        buffer = ReplayBuffer(
            make_spec(self.num_tasks),
            (self.capacity + more) * self.num_rings + self.num_rings - 1,
            seed=self.next_id,
            tasks=self.tasks,
            folder=self.map_folder,
        )
        return buffer, make_snapshots(self.replay, self.chunk_rows, self.save_last)

    def of_tasks(self):
        """Return the numbers of each task's transitions."""
        numbers = [set() for _ in range(self.num_tasks)]
        for task, ring in zip(self.tasks, self.rings, strict=True):
            numbers[task] |= {*ring}
        return numbers

    def batch(self, buffer):
        return buffer.sample(ROWS * self.num_tasks) if all(self.of_tasks()) else None

    def files(self):
        return {path.name: path for path in self.replay.iterdir()} if self.replay.exists() else {}

    @rule(rings=st.lists(st.integers(0, 3), max_size=10))
    def add(self, rings):
        rings = [ring % self.num_rings for ring in rings]
        rings = [r for i, r in enumerate(rings) if rings[:i].count(r) < self.capacity]
        ids = range(self.next_id, self.next_id + len(rings))
        self.next_id += len(rings)
        self.buffer.add(make_transitions(ids, [self.tasks[ring] for ring in rings], rings))
        for ring, number in zip(rings, ids, strict=True):
            self.rings[ring] = [*self.rings[ring], number][-self.capacity :]
            self.added[ring] += 1

    @rule()
    def sample(self):
        batch = self.batch(self.buffer)
        if batch is not None:
            drawn_Rn = ids_of(batch).reshape(self.num_tasks, ROWS)
            assert [{*drawn_n} for drawn_n in drawn_Rn.tolist()] == self.of_tasks()
            assert batch.task_Rn.tolist() == [[task] * ROWS for task in range(self.num_tasks)]

    @rule()
    def write_ahead(self):
        self.snapshots.finish()
        before = len(self.files())
        is_written = self.snapshots.write_full_chunk(self.buffer.storage)
        self.snapshots.finish()
        assert is_written == (len(self.files()) == before + 1)

    @rule()
    def save(self):
        manifest = json.loads(json.dumps(self.snapshots.save(self.buffer.storage)))
        files = self.files().keys()
        assert self.snapshots.save(self.buffer.storage) == manifest
        assert self.files().keys() == files, "nothing is written twice"
        largest = max(1, self.chunk_rows // self.num_rings)
        for chunk in manifest["all_ranks"]["chunks"]:
            assert (np.array(chunk["end"]) - chunk["first"]).max() <= largest
        share = None if self.save_last is None else -(-self.save_last // self.num_rings)
        rings = [ring if share is None else ring[-share:] for ring in self.rings]
        state = self.buffer.state_dict()
        batch = self.batch(self.buffer) if rings == self.rings else None
        self.saved.append((manifest, rings, list(self.added), state, batch))

    @rule(num_written=st.integers(0, 7))
    def save_on_a_full_disk(self, num_written):
        calls, save = [], np.save

        def full_save(file, array, **options):
            calls.append(1)
            if len(calls) > num_written:
                raise OSError(errno.ENOSPC, "No space left on device")
            save(file, array, **options)

        with mock.patch.object(np, "save", full_save), suppress(OSError):
            self.snapshots.save(self.buffer.storage)

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
        assert self.files().keys() == {c["file"] for c in manifest["all_ranks"]["chunks"]}

    @precondition(lambda self: self.saved)
    @rule(place=PLACE, more=st.sampled_from([None, 0, 3]))
    def restore(self, place, more):
        """Restore into another replay, which may be larger; continue with it if it is None."""
        manifest, rings, added, state, batch = self.saved[place % len(self.saved)]
        buffer, snapshots = self.fresh(more or 0)
        snapshots.load(manifest, buffer.storage)
        buffer.load_state_dict(state)
        assert held(buffer.storage) == rings
        assert buffer.storage.added_E.tolist() == added
        if batch is not None:
            assert_same_batch(buffer.sample(ROWS * self.num_tasks), batch)
        if more is None:
            self.buffer, self.snapshots = buffer, snapshots
            self.rings, self.added = [list(ring) for ring in rings], list(added)

    @invariant()
    def holds_the_newest_rows(self):
        if not hasattr(self, "buffer"):
            return
        storage = self.buffer.storage
        assert held(storage) == self.rings
        assert storage.added_E.tolist() == self.added
        assert storage.size_E.tolist() == [len(ring) for ring in self.rings]
        assert len(self.buffer) == sum(len(ring) for ring in self.rings)
        assert self.map_folder is None or {p.name for p in self.folder.iterdir()} <= {"replay"}

    @invariant()
    def files_are_complete_and_never_change(self):
        if not hasattr(self, "buffer"):
            return
        found = {name: (path.stat(), path.read_bytes()) for name, path in self.files().items()}
        assert all(name.endswith(".npy") for name in found)
        for name in found.keys() & self.contents.keys():
            (now, content), (before, expected) = found[name], self.contents[name]
            assert (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
            assert content == expected
        self.contents = found

    def teardown(self):
        if hasattr(self, "folder"):
            self.snapshots.finish()
            shutil.rmtree(self.folder)


TestReplay = ReplayMachine.TestCase
TestReplay.settings = settings(max_examples=20, stateful_step_count=40)
