"""Runs, files and values among the arguments of ``fit``, ``validate`` and ``test``."""

import pytest
import torch
import yaml
from jsonargparse import ArgumentError

from mtrl_lightning.__main__ import main as program
from mtrl_lightning.checkpoints import FORMAT
from mtrl_lightning.cli.lightning_cli import parsed, plain_arguments
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.command_line import CONFIGS, ROOT

FILES = [word for name in CONFIGS for word in ("-c", name)]


def parse(*args, command="fit"):
    return parsed([command, *map(str, args)])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run named ``try``, in ``runs`` of the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "try" / "version_0"
    (folder / "checkpoints").mkdir(parents=True)
    config = f"extends: [{', '.join(CONFIGS)}]\nname: try\nevaluation: {{every: 5}}\n"
    (folder / "config.yaml").write_text(config)
    for name in ("best", "last", "env_steps=000000000900"):
        state = {"mtrl_lightning": {"format": FORMAT}}
        torch.save(state, folder / "checkpoints" / f"{name}.ckpt")
    return folder


def test_resume_begins_with_the_configuration_of_the_run(run):
    last = run / "checkpoints" / "last.ckpt"
    for given in (["--resume", run], ["--resume=try"]):
        config = parse("--metrics.every", 7, *given)
        assert (config["name"], config["metrics"]["every"]) == ("try", 7)
        assert last.samefile(config["ckpt_path"]) and config["evaluation"]["every"] == 5
    step = run / "checkpoints" / "env_steps=000000000900.ckpt"
    assert parse(f"--resume={step}")["ckpt_path"] == str(step)
    with pytest.raises(ConfigurationError, match="init_from"):
        parse("--resume=try", "--init_from=mt10")


def test_validate_and_test_take_the_best_checkpoint(run):
    best = run / "checkpoints" / "best.ckpt"
    options = ["--evaluation.num_episodes", 5, "--tasks", "a", "b"]
    config = parse("try", *options, command="validate")
    assert best.samefile(config["ckpt_path"]) and config["tasks"] == ["a", "b"]
    assert config["evaluation"]["num_episodes"] == 5
    best.unlink()
    last = parse(run, command="test")["ckpt_path"]
    assert last == str(run / "checkpoints" / "last.ckpt")
    mt10 = parse("mt10", command="test")["ckpt_path"]
    assert mt10.endswith("policies/mt10/checkpoints/best.ckpt")


def test_files_set_the_class_of_data_and_drop_options_it_lacks():
    batch = "--data.batch_size=96"
    data = parse(*FILES, batch)["data"]
    assert data["class_path"].endswith("ReplayData") and data["init_args"]["batch_size"] == 96
    data = parse(*FILES, batch, "-c", "algorithm/mtppo")["data"]
    assert data["class_path"].endswith("RolloutData") and "batch_size" not in data["init_args"]
    assert data["init_args"]["benchmark"]["class_path"].endswith("ToyReach")
    with pytest.raises(ArgumentError, match="batch_size"):
        parse(*FILES, "-c", "algorithm/mtppo", batch)


def test_values_of_sweeps_are_accepted():
    sweep = yaml.safe_load((ROOT / "examples" / "sweep_wandb.yaml").read_text())
    layer_norm = "--model.init_args.critic.init_args.layer_norm"
    rates = [f"--{name}=3e-4" for name in sweep["parameters"] if f"--{name}" != layer_norm]
    numbers = ["--data.total_steps", "1e5", layer_norm, "--data.warmup_steps=2.5e+3"]
    config = parse(*sweep["command"][3:-1], *rates, *numbers)
    assert config["data"]["init_args"]["total_steps"] == 100_000
    assert config["data"]["init_args"]["warmup_steps"] == 2_500
    assert config["model"]["init_args"]["critic"]["init_args"]["layer_norm"] is True
    assert config["model"]["init_args"]["actor_optimizer"]["init_args"]["lr"] == 3e-4
    kept = ["fit", "--model.help", "--model.init_args.discount=1e-5", "--x.y", "-1", "--name=a1e5"]
    assert plain_arguments(kept) == kept


def test_options_without_a_command_are_those_of_fit(monkeypatch):
    """W&B's default command of a sweep gives no command."""
    called = []
    monkeypatch.setattr("mtrl_lightning.cli.lightning_cli.main", called.append)
    program(["--config=quickstart", "--data.total_steps=5"])
    assert called == [["fit", "--config=quickstart", "--data.total_steps=5"]]
