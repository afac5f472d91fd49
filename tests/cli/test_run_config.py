"""What commands say of a run whose classes they import, and files that no run has written."""

import os
import sys

import pytest
import yaml

from mtrl_lightning.__main__ import main
from mtrl_lightning.cli.run_config import foreign_names, read_run_config
from tests.helpers.command_line import ROOT

OWN = """\
import sys

from mtrl_lightning.envs import ToyReach
from mtrl_lightning.rollout import ActionNoise

print("own_parts is imported", file=sys.stderr)


class Tasks(ToyReach):
    pass


class Gentle(ActionNoise):
    pass
"""
COMMANDS = {
    "play": ["--width=64", "--height=48", "--num_workers=0"],
    "export": ["--to=torch.export"],
    "validate": ["--evaluation.num_episodes=1"],
    "fit": ["--rollout.total_steps=990", "--trainer.enable_progress_bar=false"],
}


def call(command, run, monkeypatch, capsys, *options):
    """Run a command in the run's parent folder, and return what it prints as errors."""
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    given = [f"--resume={run}"] if command == "fit" else [str(run)]
    capsys.readouterr()
    main([command, *given, *COMMANDS[command], *options])
    return capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_classes_of_other_packages_are_named_once_before_they_are_imported(
    command, command_line, monkeypatch, capsys
):
    command_line.finished()
    run = command_line.folder()
    file = run / "config.yaml"
    assert "note:" not in call(command, run, monkeypatch, capsys), "the package's own classes"

    config = yaml.safe_load(file.read_text())
    config["data"]["benchmark"]["class_path"] = "own_parts.Tasks"
    gentle = {"class_path": "own_parts.Gentle", "init_args": {"std": 0.5}}
    config["rollout"]["action_transforms"] = [gentle]
    file.write_text(yaml.safe_dump(config))
    os.utime(file)  # the newest configuration of the run
    (run.parent / "own_parts.py").write_text(OWN)
    longer = ["--rollout.total_steps=1080"] if command == "fit" else []
    printed = call(command, run, monkeypatch, capsys, *longer)
    assert printed.count("note:") == printed.count("own_parts is imported") == 1
    assert f"note: {file} names own_parts.Gentle, own_parts.Tasks, which" in printed
    assert printed.index("note:") < printed.index("own_parts is imported")


def test_another_process_of_the_same_run_says_nothing(tmp_path, monkeypatch, capsys):
    file = tmp_path / "config.yaml"
    file.write_text("model: {class_path: json.JSONDecoder}\n")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_run_config(file)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert read_run_config(file)
    assert "names json.JSONDecoder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({"a": [{"class_path": "json.JSONDecoder"}]}, ["json.JSONDecoder"]),
        ({"tasks": {"a": "json.make", "b": "csv:Reach-v0"}}, ["csv", "json.make"]),
        ("{class_path: json.decoder.X, init_args: {a: [csv.Y]}}", ["csv.Y", "json.decoder.X"]),
        ("part.yaml", ["part.yaml"]),
        (["torch.nn.ReLU", "gymnasium.wrappers.Autoreset", "mtrl_lightning.SAC"], []),
        (["/data/json.old/a", "json.txt/b", "runs/json.x", "c-json.x", "json", 1.5, None], []),
        (["no_such_module.Own", "cuda:0", "x" * 300, "Pendulum-v1"], []),
    ],
)
def test_what_is_named_in_any_form(value, names, tmp_path):
    (tmp_path / "part.yaml").touch()
    assert foreign_names(value, tmp_path) == names


def test_the_configurations_of_the_package_name_its_own_classes_alone(tmp_path):
    files = list(ROOT.glob("configs/**/*.yaml"))
    assert len(files) > 100
    found = {str(path): foreign_names(yaml.safe_load(path.read_text()), tmp_path) for path in files}
    assert {path: names for path, names in found.items() if names} == {}
