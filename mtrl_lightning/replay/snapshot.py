"""The replay on disk: immutable files of rows ("chunks"), each written once.

A save writes only the rows that are in no chunk yet and returns a manifest: the chunks that
together hold every row to be restored. A checkpoint carries its manifest. A chunk is the arrays of
``Rows`` one after another in NumPy's format.
"""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay.storage import RingStorage, Rows

NAME = re.compile(r"rows_\d+_\d+_[0-9a-f]{8}\.npy")
REMEDY = "continue from another checkpoint, or without the replay (--replay.restore false)"


class ReplaySnapshots:
    """Write and read the rows of a ``RingStorage``.

    Args:
        folder: where the chunks lie; made when first needed.
        chunk_size: rows of a chunk.
        save_last: rows that are saved, the newest of all rings together; None for all.

    Raises:
        ConfigurationError: if a number is below 1.
    """

    def __init__(
        self, folder: Path, chunk_size: int = 100_000, save_last: int | None = None
    ) -> None:
        if chunk_size < 1 or (save_last is not None and save_last < 1):
            raise ConfigurationError(
                f"replay.chunk_size is {chunk_size}, replay.save_last {save_last}: give at least 1"
                " (null saves all)"
            )
        self.folder, self._chunk_size, self._save_last = folder, chunk_size, save_last
        self._chunks: list[dict[str, Any]] = []

    def write_ahead(self, storage: RingStorage) -> bool:
        """Write one chunk if there are rows for a whole one, so that the next save has less to do."""
        first_R = self._first_unwritten(storage)
        full = int((storage.added_R - first_R).sum()) >= self._chunk_size
        if full:
            self._write(storage, first_R)
        return full

    def save(self, storage: RingStorage) -> dict[str, Any]:
        """Write the rows that are in no chunk yet.

        Returns:
            The manifest, of plain values: for each ring the rows ever added and the oldest one
            saved, and the chunks.

        Raises:
            OSError: if the disk is full or broken; what was saved before stays whole.
        """
        while ((first_R := self._first_unwritten(storage)) < storage.added_R).any():
            self._write(storage, first_R)
        oldest_R = self._oldest_saved(storage)
        self._chunks = [
            chunk for chunk in self._chunks if (np.array(chunk["end"]) > oldest_R).any()
        ]
        return {
            "capacity": storage.capacity,
            "added": storage.added_R.tolist(),
            "oldest": oldest_R.tolist(),
            "chunks": list(self._chunks),
        }

    def _oldest_saved(self, storage: RingStorage) -> npt.NDArray[np.int64]:
        rows = storage.size_R
        if self._save_last is not None:
            rows = np.minimum(rows, -(-self._save_last // storage.num_rings))
        return storage.added_R - rows

    def _first_unwritten(self, storage: RingStorage) -> npt.NDArray[np.int64]:
        oldest_R = self._oldest_saved(storage)
        return np.maximum(oldest_R, self._chunks[-1]["end"]) if self._chunks else oldest_R

    def _write(self, storage: RingStorage, first_R: npt.NDArray[np.int64]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        end_R = np.minimum(storage.added_R, first_R + max(1, self._chunk_size // storage.num_rings))
        spans = enumerate(zip(first_R.tolist(), end_R.tolist(), strict=True))
        rows = storage.take(
            torch.cat([storage.places(ring, first, end) for ring, (first, end) in spans])
        )
        unfinished = self.folder / "rows.unfinished"
        try:
            with unfinished.open("wb") as file:
                summed = _Checksummed(file)
                for field in rows:
                    np.save(summed, field.cpu().numpy(), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            unfinished.unlink(missing_ok=True)  # others need the room
            raise
        # the checksum in the name keeps a run that continues from an older checkpoint from
        # overwriting newer files
        name = f"rows_{int(first_R.sum()):012d}_{int(end_R.sum()):012d}_{summed.crc32:08x}.npy"
        unfinished.replace(self.folder / name)
        self._chunks.append(
            {"file": name, "first": first_R.tolist(), "end": end_R.tolist(), "crc32": summed.crc32}
        )

    def load(self, manifest: dict[str, Any], storage: RingStorage) -> None:
        """Fill an empty storage with the rows of a manifest, each in its former place.

        Raises:
            ConfigurationError: naming the file, if one is missing or damaged, or if the shapes
                differ.
        """
        if manifest["capacity"] != storage.capacity or len(manifest["added"]) != storage.num_rings:
            raise ConfigurationError(
                f"the checkpoint's replay has {len(manifest['added'])} tasks of"
                f" {manifest['capacity']:,} rows, this run"
                f" {storage.num_rings} of {storage.capacity:,}: continue with the run's own tasks"
                " and data.capacity"
            )
        check_manifest(manifest)
        for chunk in manifest["chunks"]:
            first_R, end_R = np.array(chunk["first"]), np.array(chunk["end"])
            ring_N = np.repeat(np.arange(storage.num_rings), end_R - first_R)
            storage.added_R[:] = first_R
            storage.add(ring_N, self._read(chunk))
        storage.added_R[:] = manifest["added"]
        oldest_R = np.array(manifest["oldest"])
        storage.oldest_R[:] = np.where(oldest_R > storage.added_R - storage.capacity, oldest_R, 0)
        self._chunks = list(manifest["chunks"])

    def verify(self, manifest: dict[str, Any]) -> None:
        """Read every chunk of a manifest without keeping it.

        Raises:
            ConfigurationError: naming the file, if one is missing or damaged.
        """
        check_manifest(manifest)
        for chunk in manifest["chunks"]:
            self._content(chunk)

    def _read(self, chunk: dict[str, Any]) -> Rows:
        content = io.BytesIO(self._content(chunk))
        try:
            return Rows(
                *(torch.from_numpy(np.load(content, allow_pickle=False)) for _ in Rows._fields)
            )
        except (ValueError, EOFError, TypeError) as error:
            raise ConfigurationError(
                f"the replay file {self.folder / chunk['file']} cannot be understood ({error}):"
                f" {REMEDY}"
            ) from error

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
            raise ConfigurationError(f"the replay file {path} {wrong}: {REMEDY}")
        return content

    def prune(self, manifests: Iterable[dict[str, Any]]) -> None:
        """Delete the files that neither a manifest lists nor the next one will."""
        kept = {chunk["file"] for chunk in self._chunks}
        kept |= {chunk["file"] for manifest in manifests for chunk in manifest["chunks"]}
        for path in self.folder.glob("rows*"):
            if path.name not in kept:
                path.unlink(missing_ok=True)


class _Checksummed:
    """A file that is written from the beginning to the end, and the CRC-32 of what was written."""

    def __init__(self, file: Any) -> None:
        self._file, self.crc32 = file, 0

    def write(self, content: bytes) -> int:
        self.crc32 = zlib.crc32(content, self.crc32)
        return self._file.write(content)


def check_manifest(manifest: dict[str, Any]) -> None:
    """Check that a manifest names chunks in the run's own folder which follow one another without a gap.

    Raises:
        ConfigurationError: if it does not.
    """
    try:
        strange = [
            chunk["file"] for chunk in manifest["chunks"] if not NAME.fullmatch(chunk["file"])
        ]
        wrong = f"names {strange[0]!r}, no file of a replay" if strange else ""
        added_R, oldest_R = (
            np.array(manifest["added"], np.int64),
            np.array(manifest["oldest"], np.int64),
        )
        reached_R = oldest_R
        for chunk in manifest["chunks"]:
            first_R, end_R = np.array(chunk["first"], np.int64), np.array(chunk["end"], np.int64)
            gap_R = first_R > np.maximum(reached_R, oldest_R)
            if (gap_R | (end_R < first_R) | (end_R - first_R > manifest["capacity"])).any():
                wrong = wrong or f"does not follow at {chunk['file']}"
            reached_R = end_R
        if (reached_R != added_R).any() or (oldest_R > added_R).any() or (oldest_R < 0).any():
            wrong = wrong or "does not hold all rows"
    except (KeyError, TypeError, ValueError) as error:
        wrong = f"cannot be understood ({error})"
    if wrong:
        raise ConfigurationError(f"the checkpoint's list of replay files {wrong}: {REMEDY}")
