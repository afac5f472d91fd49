"""The table of the tests that take longest, and the program that writes it."""

import ast
import csv
import sys
from functools import cache

import pytest

from tests import durations

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_b" name="test_c[1]" time="1.5" />
<testcase classname="tests.a.test_b" name="test_c[2]" time="0.75" />
<testcase classname="tests.test_d" name="test_short" time="1.9" />
<testcase classname="tests.test_d" name="test_long" time="3.0" />
</testsuite></testsuites>"""


def test_cases_of_a_test_are_added_and_short_tests_have_no_row(tmp_path):
    report = tmp_path / "fast.xml"
    report.write_text(REPORT)

    assert durations.rows_of("fast", report) == [
        ("fast", "3.0", 1, "tests/test_d.py::test_long"),
        ("fast", "2.2", 2, "tests/a/test_b.py::test_c"),
    ]


def test_the_program_writes_both_tiers_and_says_how_it_is_used(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.csv")
    for tier in ("fast", "slow"):
        (tmp_path / f"{tier}.xml").write_text(REPORT)
    monkeypatch.setattr(sys, "argv", ["durations", *map(str, sorted(tmp_path.glob("*.xml")))])
    durations.main()
    lines = durations.FILE.read_text().splitlines()
    assert lines[0] == "tier,seconds,cases,test" and len(lines) == 5
    assert lines[1] == "slow,3.0,1,tests/test_d.py::test_long" and lines[4].startswith("fast,2.2")

    monkeypatch.setattr(sys, "argv", ["durations", "--help"])
    with pytest.raises(SystemExit):
        durations.main()
    assert "--junitxml fast.xml" in capsys.readouterr().out


def test_every_row_names_a_test():
    root = durations.FILE.parents[1]

    @cache
    def functions(file):
        tree = ast.parse((root / file).read_text())
        return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

    with durations.FILE.open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert {row["tier"] for row in rows} == {"fast", "slow"}
    for row in rows:
        path, _, name = row["test"].partition("::")
        assert (root / path).is_file() and name in functions(path), row["test"]
