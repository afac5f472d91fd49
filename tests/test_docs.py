"""The pages build without a warning."""

import subprocess
import sys

import pytest

from tests.helpers.command_line import ROOT

DOCS = ROOT / "docs"
BUILD = """
import gc, sys
from sphinx.cmd.build import main
gc.disable()
sys.exit(main(sys.argv[1:]))
"""
"""``python -m sphinx`` without a search for garbage, which takes a third of its time."""


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install -e '.[docs]'")
    options = ["-q", "-n", "-W", "--keep-going", "-d", str(tmp_path / "doctrees")]
    line = [sys.executable, "-c", BUILD, *options, str(DOCS), str(tmp_path / "site")]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
