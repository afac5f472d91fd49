"""Every file of recorded results names the command and the commit that made it."""

import csv
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
COMMIT = "[0-9a-f]{7,40}"
MEASURED_AT = re.compile(f"(at the latest |a working tree before )?{COMMIT}")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def tracked():
    """Return the paths that git tracks under the results, relative to them."""
    if not (ROOT / ".git").exists():
        pytest.skip("which files are results is known in a clone alone")
    line = ["git", "ls-files", "-z", "."]
    result = subprocess.run(line, cwd=RESULTS, capture_output=True, text=True, check=True)
    return {name for name in result.stdout.split("\0") if name}


@pytest.fixture(scope="module")
def rows():
    with (RESULTS / "recorded.csv").open(newline="") as file:
        return list(csv.DictReader(file, strict=True))


def names_itself(name):
    """Return whether a file is JSON that holds its command and its commit."""
    if not name.endswith(".json"):
        return False
    content = json.loads((RESULTS / name).read_text())
    return bool(content.get("command")) and bool(re.match(COMMIT, content.get("commit") or ""))


def test_every_data_file_names_its_command_and_commit(tracked, rows):
    data = {name for name in tracked if not name.endswith("README.md")} - {"recorded.csv"}
    assert len(data) > 100
    missing = {name for name in data if not names_itself(name)} - {row["file"] for row in rows}
    assert not missing, "without a row in recorded.csv, or command and commit in the JSON file"


def test_rows_are_of_tracked_files_and_complete(tracked, rows):
    names = [row["file"] for row in rows]
    assert names == sorted(set(names)), "a file has one row; rows are sorted by file"
    assert not set(names) - tracked, "rows of files that are gone"
    for row in rows:
        assert re.fullmatch(COMMIT, row["recorded_in"]), row
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row["date"]), row
        assert MEASURED_AT.fullmatch(row["measured_at"]), row
        assert row["command"].strip(), row


def test_rows_agree_with_json_files(rows):
    """A JSON file without a commit holds its command, and the commit that the table repeats."""
    checked = 0
    for row in rows:
        if row["file"].endswith(".json"):
            content = json.loads((RESULTS / row["file"]).read_text())
            assert content["command"].startswith("python -m "), row
            assert content["recorded_in"].startswith(row["recorded_in"]), row
            checked += 1
    assert checked


def test_links_and_plots_of_the_readmes_exist(tracked):
    pages = [name for name in tracked if name.endswith("README.md")]
    assert len(pages) > 10
    for name in pages:
        page = RESULTS / name
        for target in LINK.findall(page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{name} links to {target}"
