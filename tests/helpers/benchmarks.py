"""Variants of the benchmarks that run in the test's own process."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile

from benchmarks.measuring import PIPE
from mtrl_lightning.__main__ import main as command_line


def lines_of(command, monkeypatch, rounds=2):
    """Run a variant's command in this process for some windows; return what it writes."""
    with tempfile.TemporaryFile("w+") as file, monkeypatch.context() as patched:
        patched.setenv(PIPE, str(os.dup(file.fileno())))
        patched.setattr(sys, "stdin", io.StringIO("go\n" * rounds))
        try:
            if command[1] == "-c":
                patched.setattr(sys, "argv", ["-c", *command[3:]])
                exec(command[2], {})
            else:
                patched.setattr(sys, "argv", ["mtrl-lightning", *command[3:]])
                command_line()
        except SystemExit as ended:
            assert not ended.code
        file.seek(0)
        return [json.loads(line) for line in file]
