"""What a part of ``benchmarks.gpu`` has found, in a file that is complete after every row."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measuring import say
from mtrl_lightning.runs import replacing

ERROR_CHARACTERS = 2_000
"""Characters of an error that are kept: its end."""


class Sheet:
    """Tables, notes and failures of a part; an interruption loses nothing that was found.

    Args:
        path: JSON file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: dict[str, Any] = {"tables": {}, "notes": [], "failures": []}

    def row(self, table: str, **cells: Any) -> None:
        """Append a row to a table.

        Args:
            table: its title.
            cells: texts and numbers by column; rows of a table may have different columns.
        """
        self._content["tables"].setdefault(table, []).append(cells)
        self._write()

    def note(self, text: str) -> None:
        """Append a sentence."""
        self._content["notes"].append(text)
        self._write()

    def failure(self, what: str, error: str) -> None:
        """Append something that did not work, with the end of its error."""
        say(f"{what}: failed")
        self._content["failures"].append({"what": what, "error": error[-ERROR_CHARACTERS:].strip()})
        self._write()

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Turn an exception into a failure, so that the rest is measured all the same."""
        try:
            yield
        except Exception:
            self.failure(what, traceback.format_exc())

    def _write(self) -> None:
        write_json(self._path, self._content)


def cells_of(unit: str, found: Mapping[str, float]) -> dict[str, float]:
    """Return a row's cells for what ``measuring.spread`` has found, the median in this unit."""
    return {unit: found["median"], "smallest": found["min"], "largest": found["max"]}


def read_sheet(path: Path) -> dict[str, Any]:
    """Return what a sheet's file holds; empty lists if it was not written."""
    empty: dict[str, Any] = {"tables": {}, "notes": [], "failures": []}
    return json.loads(path.read_text()) if path.is_file() else empty


def write_json(path: Path, content: Any) -> None:
    """Write a file that is either the former one or complete."""
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1))
