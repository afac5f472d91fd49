"""Changed files are refused or continue: they do not crash, hang, or do anything else.

``python -m tests.fuzzing --files 3000`` is the same with more files.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzzing import BASES

ROOT = Path(__file__).parent.parent
FILES = {"sac": 40, "metaworld": 30, "ppo": 30, "ranks": 15, "pixels": 15}
"""Files of each run, about a second each."""
if not hasattr(__import__("os"), "fork"):
    pytest.skip("each file is continued in a process that is forked", allow_module_level=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_changed_files_do_no_harm(tmp_path, name):
    command = [sys.executable, "-m", "tests.fuzzing", "--runs", name, "--seed", "1"]
    command += ["--files", str(FILES[name]), "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "rows.json").read_text().splitlines()
    words = [json.loads(line)["word"] for line in lines]
    assert len(words) == FILES[name]
    # what is changed is believed often enough that harm would be seen, and refused often enough
    assert words.count("refused") > len(words) / 5
    assert words.count("refused") < len(words)
