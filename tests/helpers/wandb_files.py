"""Read the files of offline W&B runs, without W&B's program or a server.

A file ``offline-run-*/run-<id>.wandb`` holds protocol buffers in LevelDB's log format.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HEADER_BYTES = 7
"""W&B's own header before the first block, and LevelDB's before each part of a record."""
BLOCK_BYTES = 32_768
WHOLE = 1
FIRST = 2
LAST = 4
"""Kinds of parts of a record: it begins with a whole or first one, and ends with a last one."""


class OfflineRun(NamedTuple):
    """Contents of the files of one offline W&B run."""

    rows: list[dict[str, Any]]
    """Logged rows by metric, in their order; ``_step`` is W&B's own step."""
    config: dict[str, Any]
    """Options, by their names with a slash between sections."""
    artifacts: list[str]
    """Names of the logged artifacts."""


def read_offline_runs(run_folder: str | Path) -> dict[str, OfflineRun]:
    """Return the offline W&B runs in a run's folder by their ids.

    A run that was continued has a file for each session; their rows are joined. What a killed
    process has not written completely is left out. In the process that made the run, call
    ``wandb.teardown()`` first: W&B writes the end of a file after the run is finished.

    Args:
        run_folder: the folder of a run, which contains ``wandb/offline-run-*``.
    """
    from wandb.proto import wandb_internal_pb2 as protocol

    runs: dict[str, OfflineRun] = {}
    for path in sorted(Path(run_folder).glob("wandb/offline-run-*/*.wandb")):
        run_id = path.stem.removeprefix("run-")
        run = runs.setdefault(run_id, OfflineRun([], {}, []))
        for data in records(path):
            _add(run, protocol.Record.FromString(data))
    return runs


def _add(run: OfflineRun, record: Any) -> None:
    """Add a record of W&B's protocol to its run."""
    row = _values(record.history.item)
    if row:
        run.rows.append(row)
    run.config.update(_values(record.run.config.update))
    run.config.update(_values(record.config.update))
    artifact = record.artifact.name or record.request.log_artifact.artifact.name
    if artifact:
        run.artifacts.append(artifact)


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file; a last one that is not complete is left out."""
    data = path.read_bytes()
    position = HEADER_BYTES
    record = bytearray()
    while position + HEADER_BYTES <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < HEADER_BYTES:  # padding
            position += left_in_block
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + HEADER_BYTES])
        if kind == 0:
            position += left_in_block
            continue
        position += HEADER_BYTES
        if position + length > len(data):
            return
        if kind in (WHOLE, FIRST):
            record.clear()  # the process that wrote the previous one was killed in the middle
        record += data[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            yield bytes(record)
            record.clear()


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
