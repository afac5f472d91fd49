"""The replay on disk: immutable files of rows, each written once.

A save writes only the rows added since the last one, and returns a manifest: the files that together hold every row
that the buffer holds. A checkpoint carries its manifest.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrl_lightning.errors import ConfigurationError
from mtrl_lightning.replay.storage import RingStorage, Rows


class ReplaySnapshots:
    """Write and read the rows of a ``RingStorage``.

    Args:
        folder: where the files lie; made when first needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._chunks: list[dict[str, Any]] = []

    def save(self, storage: RingStorage) -> dict[str, Any]:
        """Write the rows that are in no file yet.

        Returns:
            The manifest, of plain values: for each ring the rows ever added, and the files that hold those still there.
        """
        oldest_R = storage.added_R - storage.size_R
        written = np.array(self._chunks[-1]["end"]) if self._chunks else np.zeros_like(storage.added_R)
        first_R = np.maximum(written, oldest_R)
        if (first_R < storage.added_R).any():
            self._chunks.append(self._write(storage, first_R))
        self._chunks = [chunk for chunk in self._chunks if (np.array(chunk["end"]) > oldest_R).any()]
        return {"capacity": storage.capacity, "added": storage.added_R.tolist(), "chunks": list(self._chunks)}

    def _write(self, storage: RingStorage, first_R: np.ndarray) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        spans = enumerate(zip(first_R.tolist(), storage.added_R.tolist(), strict=True))
        rows = storage.take(torch.cat([storage.places(ring, first, end) for ring, (first, end) in spans]))
        unfinished = self.folder / "rows.unfinished"
        with unfinished.open("wb") as file:
            arrays: dict[str, Any] = {name: rows_N.numpy() for name, rows_N in rows._asdict().items()}
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        checksum = _checksum(unfinished)
        # the checksum in the name keeps a run that continues from an older checkpoint from overwriting newer files
        name = f"rows_{int(first_R.sum()):012d}_{int(storage.added_R.sum()):012d}_{checksum:08x}.npz"
        unfinished.replace(self.folder / name)
        return {"file": name, "first": first_R.tolist(), "end": storage.added_R.tolist(), "crc32": checksum}

    def load(self, manifest: dict[str, Any], storage: RingStorage) -> None:
        """Fill an empty storage with the rows of a manifest, in the order in which they were added.

        Raises:
            ConfigurationError: naming the file, if one is missing or damaged, or if the shapes differ.
        """
        if manifest["capacity"] != storage.capacity or len(manifest["added"]) != storage.num_rings:
            raise ConfigurationError(
                f"the checkpoint's replay has {len(manifest['added'])} tasks of {manifest['capacity']:,} rows, this run"
                f" {storage.num_rings} of {storage.capacity:,}: continue with the run's own tasks and data.capacity"
            )
        for chunk in manifest["chunks"]:
            first_R, end_R = np.array(chunk["first"]), np.array(chunk["end"])
            ring_N = np.repeat(np.arange(storage.num_rings), end_R - first_R)
            storage.added_R[:] = first_R
            storage.add(ring_N, self._read(chunk))
        self._chunks = list(manifest["chunks"])

    def _read(self, chunk: dict[str, Any]) -> tuple[np.ndarray, ...]:
        path = self.folder / Path(chunk["file"]).name
        try:
            if _checksum(path) == chunk["crc32"]:
                with np.load(path, allow_pickle=False) as file:
                    return tuple(file[field] for field in Rows._fields)
            wrong = "is damaged"
        except FileNotFoundError:
            wrong = "is missing"
        except (OSError, EOFError, zipfile.BadZipFile, KeyError, ValueError) as error:
            wrong = f"cannot be read ({error})"
        raise ConfigurationError(f"the replay file {path} {wrong}: continue from another checkpoint")

    def prune(self, manifests: Iterable[dict[str, Any]]) -> None:
        """Delete the files that no manifest lists."""
        kept = {chunk["file"] for manifest in manifests for chunk in manifest["chunks"]}
        for path in self.folder.glob("rows_*"):
            if path.name not in kept:
                path.unlink()


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value
