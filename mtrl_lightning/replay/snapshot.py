"""The replay on disk: immutable files of transitions ("chunks"), each written once.

A chunk is renamed to its final name only when it is complete and synced to disk, which happens in a
thread. A save only writes the transitions that are not in a chunk yet and returns a manifest: the
chunks with all transitions to be restored. The manifest is part of the checkpoint. A chunk consists
of the columns of the schema, each in NumPy's format. Each process ("rank") of a run writes chunks
of its own environments, with its rank in their names, and reads those that contain transitions of
its environments.

Shapes: ``E`` environments (rings), ``N`` transitions of a chunk.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtrl_lightning.checkpoints import ALL_RANKS, PER_ENV
from mtrl_lightning.checks import above, at_least
from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.ranks import distributed
from mtrl_lightning.replay.storage import Storage

MEBIBYTE = 1 << 20


class ReplaySnapshots:
    """Write and read the transitions of a ``Storage``.

    Args:
        folder: folder of the chunks, created when needed.
        chunk_mebibytes: size of a chunk in MiB.
        save_last: number of newest transitions to save, over all rings; None for all.
        envs: global index of each ring's environment; None for a single rank.
    """

    def __init__(
        self,
        folder: Path,
        chunk_mebibytes: float = 32.0,
        save_last: int | None = None,
        envs: Sequence[int] | None = None,
    ) -> None:
        above(0, chunk_mebibytes=chunk_mebibytes, prefix="data.")
        at_least(1, save_last=save_last, prefix="data.", hint=", or null for all transitions")
        self.folder = folder
        self._chunk_bytes = chunk_mebibytes * MEBIBYTE
        self._save_last = save_last
        self._envs = envs
        self._chunks: list[dict[str, Any]] = []
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._writing: Future[dict[str, Any]] | None = None
        """Returns the last chunk's file name and checksum; None if no file is being written."""

    def write_full_chunk(self, storage: Storage) -> bool:
        """Let a thread write a chunk if there are enough transitions for a full one.

        Returns:
            Whether a chunk is written.

        Raises:
            OSError: if writing the previous one failed; earlier chunks stay valid, and the next
                save retries.
        """
        if self._writing is not None and self._writing.done():
            self.finish()
        first_E = self._first_unwritten(storage)
        is_full = int((storage.added_E - first_E).sum()) >= self._chunk_rows(storage)
        if is_full:
            self._write(storage, first_E)
        return is_full

    def finish(self) -> None:
        """Wait for the chunk that is being written.

        Raises:
            OSError: if writing fails; the chunk is discarded.
        """
        if self._writing is None:
            return
        writing = self._writing
        self._writing = None
        try:
            self._chunks[-1] |= writing.result()
        except BaseException:
            self._chunks.pop()
            raise

    def save(self, storage: Storage) -> dict[str, Any]:
        """Write the transitions that are not in a chunk yet.

        Returns:
            The manifest as plain values: the schema; for each ring, the number of transitions ever
            added and that of the oldest one saved; the chunks.

        Raises:
            OSError: if writing fails; earlier chunks stay valid.
        """
        self.finish()
        while ((first_E := self._first_unwritten(storage)) < storage.added_E).any():
            self._write(storage, first_E)
        self.finish()
        oldest_E = self._oldest_saved(storage)
        self._chunks = [
            chunk for chunk in self._chunks if (np.array(chunk["end"]) > oldest_E).any()
        ]
        return {
            "fields": _plain_fields(storage),
            "layout": storage.layout,
            "capacity": storage.capacity,
            PER_ENV: {"added": storage.added_E.tolist(), "oldest": oldest_E.tolist()},
            ALL_RANKS: {"chunks": list(self._chunks)},
        }

    def _envs_of(self, storage: Storage) -> list[int]:
        return list(range(storage.num_envs) if self._envs is None else self._envs)

    def _chunk_rows(self, storage: Storage) -> int:
        return max(1, int(self._chunk_bytes // storage.row_bytes))

    def _oldest_saved(self, storage: Storage) -> npt.NDArray[np.int64]:
        rows_E = storage.size_E
        if self._save_last is not None:
            rows_E = np.minimum(rows_E, -(-self._save_last // storage.num_envs))
        return storage.added_E - rows_E

    def _first_unwritten(self, storage: Storage) -> npt.NDArray[np.int64]:
        oldest_E = self._oldest_saved(storage)
        # a chunk continues the previous one, unless a full ring has overwritten what follows
        return np.maximum(oldest_E, self._chunks[-1]["end"]) if self._chunks else oldest_E

    def _write(self, storage: Storage, first_E: npt.NDArray[np.int64]) -> None:
        """Start writing a chunk after the previous one is finished."""
        self.finish()
        rows_per_ring = max(1, self._chunk_rows(storage) // storage.num_envs)
        end_E = np.minimum(storage.added_E, first_E + rows_per_ring)
        columns = storage.to_columns(first_E, end_E)
        numbers = f"{distributed.rank()}_{int(first_E.sum()):012d}_{int(end_E.sum()):012d}"
        arrays = [columns[name] for name in storage.column_names]
        self._writing = self._writer.submit(self._write_file, numbers, arrays)
        envs = self._envs_of(storage)
        self._chunks.append({"envs": envs, "first": first_E.tolist(), "end": end_E.tolist()})

    def _write_file(self, numbers: str, columns: Sequence[npt.NDArray]) -> dict[str, Any]:
        """Write a chunk's file; return its name and checksum."""
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f"rows_{numbers}.unfinished"
        try:
            with unfinished.open("wb") as file:
                summed = _Checksummed(file)
                for column in columns:
                    np.save(summed, column, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            unfinished.unlink(missing_ok=True)  # free the disk space
            raise
        # the name contains the checksum, because a run that resumes from an older checkpoint writes
        # other transitions with the same numbers and must not overwrite newer files
        name = f"rows_{numbers}_{summed.crc32:08x}.npy"
        unfinished.replace(self.folder / name)
        return {"file": name, "crc32": summed.crc32}

    def load(self, manifest: dict[str, Any], storage: Storage) -> None:
        """Fill an empty storage with the transitions of its environments, with their numbers.

        Args:
            manifest: manifest of any number of ranks that includes this rank's environments.
            storage: the storage to fill.
        """
        self.finish()
        self._check_same(manifest, storage)
        envs = self._envs_of(storage)
        ring_of_env = {env: ring for ring, env in enumerate(envs)}
        chunks = manifest[ALL_RANKS]["chunks"]
        for chunk in chunks:
            ring_E = np.array([ring_of_env.get(env, -1) for env in chunk["envs"]])
            if (ring_E >= 0).any():
                self._restore(chunk, storage, ring_E)
        storage.restore_from(np.array(manifest[PER_ENV]["added"]))
        oldest_E = np.array(manifest[PER_ENV]["oldest"])
        # with save_last, the files have fewer transitions than a ring: mark older ones as missing
        is_cut_E = oldest_E > storage.added_E - storage.size_E
        storage.oldest_E[:] = np.where(is_cut_E, oldest_E, 0)
        # the next save rewrites the transitions of environments from other ranks
        self._chunks = [chunk for chunk in chunks if chunk["envs"] == envs]

    def _check_same(self, manifest: dict[str, Any], storage: Storage) -> None:
        num_envs = len(manifest[PER_ENV]["added"])
        # a larger replay can store all transitions of a smaller one, with their numbers
        if manifest["capacity"] > storage.capacity or num_envs != storage.num_envs:
            raise ConfigurationError(
                f"the checkpoint's replay has {num_envs} environments"
                f" with {manifest['capacity']:,} transitions each,"
                f" but this run has {storage.num_envs} with {storage.capacity:,}:"
                " resume with the original tasks, data.envs_per_task and data.capacity"
            )
        if manifest["layout"] != storage.layout:
            raise ConfigurationError(
                f"the checkpoint's replay has the layout {manifest['layout'] or 'full rows'},"
                f" but this run's has {storage.layout or 'full rows'}: resume with the original"
                " benchmark, or without the replay (data.restore_replay false)"
            )
        if manifest["fields"] != _plain_fields(storage):
            there = ", ".join(field[0] for field in manifest["fields"])
            here = ", ".join(field.name for field in storage.fields)
            raise ConfigurationError(
                f"the checkpoint's replay has the fields {there},"
                f" but this run has {here} (or their shapes differ):"
                " resume with the original benchmark and algorithm,"
                " or without the replay (data.restore_replay false)"
            )

    def _restore(
        self, chunk: dict[str, Any], storage: Storage, ring_E: npt.NDArray[np.int64]
    ) -> None:
        """Append a chunk's transitions to a storage.

        Args:
            chunk: an entry of a manifest.
            storage: the storage to append to.
            ring_E: the storage's ring for each ring of the chunk; -1 for none.
        """
        content = io.BytesIO(self._content(chunk))
        columns = {name: np.load(content, allow_pickle=False) for name in storage.column_names}
        storage.from_columns(columns, np.array(chunk["first"]), np.array(chunk["end"]), ring_E)

    def _content(self, chunk: dict[str, Any]) -> bytes:
        path = self.folder / chunk["file"]
        try:
            content = path.read_bytes()
            wrong = "" if zlib.crc32(content) == chunk["crc32"] else "is damaged"
        except FileNotFoundError:
            wrong = "is missing"
        except OSError as error:
            wrong = f"cannot be read ({error})"
        if wrong:
            raise ConfigurationError(
                f"the replay file {path} {wrong}: resume from another checkpoint, or without the"
                " replay (data.restore_replay false)"
            )
        return content

    def prune(self, manifests: Iterable[dict[str, Any]]) -> None:
        """Delete this rank's files that neither existing manifests nor the next one need.

        Rank 0 also deletes those of ranks that no longer exist.

        Raises:
            OSError: if deleting fails, or writing a chunk has failed.
        """
        self.finish()
        kept = {chunk["file"] for chunk in self._chunks}
        kept |= {chunk["file"] for manifest in manifests for chunk in manifest[ALL_RANKS]["chunks"]}
        rank, size = distributed.rank(), distributed.world_size()
        for path in self.folder.glob("rows_*"):
            writer = int(path.name.split("_")[1])
            if path.name not in kept and (writer == rank or (rank == 0 and writer >= size)):
                path.unlink(missing_ok=True)


class _Checksummed:
    """A file that is written sequentially, and the CRC-32 of its content."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.crc32 = 0

    def write(self, content: bytes) -> int:
        self.crc32 = zlib.crc32(content, self.crc32)
        return self._file.write(content)


def _plain_fields(storage: Storage) -> list[list[Any]]:
    return [[field.name, list(field.shape), field.dtype] for field in storage.fields]
