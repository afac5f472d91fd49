"""Write ``tests/durations.csv``: the seconds of the tests that take longest.

Run both tiers on an otherwise idle machine, then this program::

    python -m pytest -n 2 --junitxml fast.xml
    python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow --junitxml slow.xml
    python -m tests.durations fast.xml slow.xml
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).with_name("durations.csv")
LEAST = 2.0
"""Seconds, of all cases of a test together, from which on it has a row."""


def test_of(case: ElementTree.Element) -> str:
    """Return the test that a case belongs to, as pytest names it: ``tests/file.py::test``."""
    *folders, name = case.attrib["classname"].split(".")
    test = case.attrib["name"].partition("[")[0]
    return f"{'/'.join([*folders, name])}.py::{test}"


def rows_of(tier: str, report: Path) -> list[tuple[str, str, int, str]]:
    """Return the rows of a tier: tier, seconds with fixtures, number of cases, and the test.

    Args:
        tier: ``fast`` or ``slow``.
        report: the file that ``--junitxml`` wrote.
    """
    times: dict[str, list[float]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        times.setdefault(test_of(case), []).append(float(case.attrib["time"]))
    longest_first = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [
        (tier, f"{sum(seconds):.1f}", len(seconds), test)
        for test, seconds in longest_first
        if sum(seconds) >= LEAST
    ]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fast", type=Path, help="pytest's report of the fast tier")
    parser.add_argument("slow", type=Path, help="pytest's report of the slow tier")
    options = parser.parse_args()
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["tier", "seconds", "cases", "test"])
        writer.writerows(rows_of("slow", options.slow))
        writer.writerows(rows_of("fast", options.fast))


if __name__ == "__main__":
    main()
