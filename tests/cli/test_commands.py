"""The commands besides fit and validate, and what surrounds all of them."""

import importlib.metadata
import os
import sys

import pytest

from mtrl_lightning.__main__ import main
from mtrl_lightning.cli.config_names import config_names
from mtrl_lightning.envs.render import opengl
from mtrl_lightning.runs import policies
from tests.helpers.command_line import CONFIGS, SMALL, config_args, fails


def listed(capsys, *words):
    """Return the names that ``list`` prints."""
    main(["list", *words])
    lines = capsys.readouterr().out.splitlines()
    return [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]


def test_list_searches_groups_names_and_descriptions(capsys):
    assert sorted(listed(capsys)) == sorted([*config_names(), *policies()])
    assert all(name.startswith("gradient/") for name in listed(capsys, "gradient"))
    assert {name for name in config_names() if "mt10" in name} <= {*listed(capsys, "MT10")}
    assert "env/dmc21" in listed(capsys, "control suite")
    main(["list", "policies"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    averages = [float(line[1]) for line in lines if line[:1] == ["average"]]
    assert averages == [0.63, 0.94, 0.98, 0.97], "of dmc21, dmc3, mt10 and mt50 in the README"
    code, error = fails(main, capsys, ["list", "gradeint"])
    assert code == 2 and "gradeint" in error


def test_doctor_prints_versions_and_fails_where_torch_is_missing(capsys, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(opengl, "find_renderer", lambda: "osmesa")
    with pytest.raises(SystemExit, match="0"):
        main(["doctor"])
    assert importlib.metadata.version("torch") in capsys.readouterr().out
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit, match="1"):
        main(["doctor"])
    assert "missing: reinstall" in capsys.readouterr().out


@pytest.mark.slow
def test_workers_find_modules_of_the_working_directory(command_line, tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    own = "from mtrl_lightning.envs import ToyReach\nclass Own(ToyReach):\n    pass\n"
    (folder / "own_tasks.py").write_text(own)
    (folder / "json.py").write_text("raise RuntimeError('hides the library')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    benchmark = [
        "--data.benchmark=own_tasks.Own",
        "--data.benchmark.init_args.num_tasks=2",
        "--data.num_workers=1",
        "--data.total_steps=320",
        "--data.batch_size=64",
    ]
    main(["fit", *config_args(*CONFIGS), *SMALL, f"--root={tmp_path}", *benchmark])
    assert command_line.rows()[-1]["env_steps"] == 320
    assert sys.path[-1] == os.getcwd()
