"""The script that shows whether a change leaves the numbers of runs as they are."""

import sys

import pytest

from tests import frozen

pytestmark = pytest.mark.slow


def test_equal_runs_have_equal_hashes_and_another_seed_is_told(tmp_path, monkeypatch, capsys):
    def compare(*options):
        arguments = ["frozen", str(tmp_path / "hashes.json"), "--only", "gradient pcgrad", *options]
        monkeypatch.setattr(sys, "argv", arguments)
        frozen.main()

    compare()
    compare("--check")
    assert capsys.readouterr().out.splitlines()[1].endswith("  same")
    monkeypatch.setattr(frozen, "NARROW", [*frozen.NARROW, "--seed_everything=2"])
    with pytest.raises(SystemExit) as ended:
        compare("--check")
    assert ended.value.code == 1 and capsys.readouterr().out.endswith("  OTHER\n")
