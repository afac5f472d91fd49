"""The parts of ``benchmarks.gpu``, each a process of its own.

``python -m benchmarks.gpu_parts OPTIONS`` is one of them; ``OPTIONS`` is JSON. A part measures with
the sizes of a GPU, or with tiny ones in a dry run, and writes what it finds into a ``Sheet``.
"""

from __future__ import annotations

import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_replay import pixels, replay
from benchmarks.gpu_runs import pace, ranks
from benchmarks.gpu_setup import Setup
from benchmarks.gpu_sheet import Sheet
from benchmarks.gpu_training import training
from benchmarks.gpu_updates import gradient_methods, updates
from benchmarks.gpu_windows import printing_to
from benchmarks.measuring import REPOSITORY, end_on_sigterm
from mtrl_lightning.resources import keep_freed_memory

HINTS = "perf_hints,recompiles,graph_breaks"
"""What PyTorch prints about compiled functions, a value of ``TORCH_LOGS``."""


def tests(setup: Setup, sheet: Sheet) -> None:
    """Run the tests that need a GPU: those with the marker ``cuda``."""
    files = marked_files(REPOSITORY / "tests")
    results = setup.path("tests.xml")
    results.unlink(missing_ok=True)
    options = ["-m", "cuda", "-p", "no:cacheprovider", "-n", "0", f"--junitxml={results}"]
    command = [sys.executable, "-m", "pytest", *map(str, files), *options]
    log = setup.path("tests.log")
    returncode = printing_to(log, command, setup)
    if not results.is_file():
        sheet.failure("pytest", log.read_text())
        return
    note_tests(results, sheet)
    if returncode not in (0, 1):  # 1: a test failed, which is noted already
        reason = f"pytest ended with {returncode}"
        if returncode is None:
            reason = "pytest: over its time"
        sheet.failure(reason, log.read_text())


def marked_files(folder: Path) -> list[Path]:
    """Return the files with tests that have the marker ``cuda``: collecting all takes long."""
    return [path for path in sorted(folder.rglob("test_*.py")) if "mark.cuda" in path.read_text()]


def note_tests(results: Path, sheet: Sheet) -> None:
    """Note the results that pytest has written, a row for each file.

    Args:
        results: XML file in JUnit's format.
        sheet: to write to.
    """
    rows: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        name = case.get("classname", "")
        row = rows.setdefault(name, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0})
        wrong = [child for child in case if child.tag in ("failure", "error")]
        is_skipped = case.find("skipped") is not None
        row["failed" if wrong else "skipped" if is_skipped else "passed"] += 1
        row["seconds"] += float(case.get("time", 0))
        for child in wrong:
            sheet.failure(f"{name}::{case.get('name')}", child.text or child.get("message") or "")
    for name, row in rows.items():
        sheet.row("tests that need a GPU", file=name, **row)


PARTS: dict[str, Callable[[Setup, Sheet], None]] = {
    "tests": tests,
    "updates": updates,
    "gradients": gradient_methods,
    "replay": replay,
    "pixels": pixels,
    "pace": pace,
    "ranks": ranks,
    "training": training,
}


def sheet_path(setup: Setup) -> Path:
    """Return where a part writes what it finds."""
    return setup.path(f"{setup.part}.json")


def run_part(setup: Setup) -> None:
    """Run one part; what goes wrong is in its sheet."""
    path = sheet_path(setup)
    path.unlink(missing_ok=True)
    sheet = Sheet(path)
    with sheet.trying(setup.part):
        PARTS[setup.part](setup, sheet)


def main() -> None:
    """Run the part that the options name."""
    setup = Setup(**json.loads(sys.argv[1]))
    end_on_sigterm()
    if setup.is_dry:
        torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    os.environ.setdefault("TORCH_LOGS", HINTS)  # of the processes that it starts
    run_part(setup)


if __name__ == "__main__":
    main()
