"""Changed files are refused or continue: they do not crash, hang, or do anything else.

``python -m tests.fuzzing --files 3000`` is the same with more files.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzzing import NAMES

ROOT = Path(__file__).parent.parent
NUM_FILES = 25
if not hasattr(os, "fork"):
    pytest.skip("each file is continued in a process that is forked", allow_module_level=True)


@pytest.mark.slow
def test_changed_files_do_no_harm(tmp_path):
    command = [sys.executable, "-m", "tests.fuzzing", "--seed", "1", "--files", str(NUM_FILES)]
    command += ["--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    assert len(rows) == NUM_FILES
    assert {row["run"] for row in rows} == set(NAMES)
    # what is changed is believed often enough that harm would be seen, and refused often enough
    refused = [row["word"] for row in rows].count("refused")
    assert NUM_FILES / 5 < refused < NUM_FILES
