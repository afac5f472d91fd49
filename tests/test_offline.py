"""Runs of an offline algorithm: what they take, print and write, and how they are continued."""

import json
import os

import pytest

from mtrl_lightning.__main__ import main
from mtrl_lightning.compare.charts import evaluation_charts
from mtrl_lightning.compare.record import read_metrics, read_run
from tests.helpers.command_line import fails
from tests.helpers.demonstrations import write_demonstrations
from tests.helpers.runs import checkpoint

OPTIONS = [
    "--model.init_args.actor.init_args.width=16",
    "--data.batch_size=12",
    "--data.total_steps=60",
    "--evaluation.num_workers=0",
    "--evaluation.every=20",
    "--evaluation.num_episodes=1",
    "--metrics.every=10",
    "--checkpoint.every_n_env_steps=20",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]
PLAIN = {"configs": ("base", "env/toy", "algorithm/bc", "network/multi_head"), "small": False}


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory):
    return write_demonstrations(tmp_path_factory.mktemp("toy") / "expert", num_episodes=3)


def options_of(folder, *options):
    return [*OPTIONS, f"--data.demonstrations={folder}", *options]


def clone(command_line, folder, *options):
    command_line("fit", *options_of(folder, *options), **PLAIN)


def test_a_run_writes_what_any_run_does(command_line, demonstrations, capsys):
    clone(command_line, demonstrations)
    assert "env steps" not in capsys.readouterr().out
    rows, folder = command_line.rows(), command_line.folder()
    steps = [int(row["env_steps"]) for row in rows if "train/actor_loss" in row]
    assert steps == list(range(10, 70, 10))
    assert not any(name.startswith("rollout/") for row in rows for name in row)
    times = {name for name in read_metrics(folder) if "time/" in name}
    spent = ("sample", "update", "evaluate", "checkpoint")
    assert times == {"time/updates_per_second", *(f"time/{name}_fraction" for name in spent)}
    charts = evaluation_charts(read_run(folder))
    assert {chart.xlabel for chart in charts} == {"updates"}
    assert not (folder / "replay").exists()
    results = folder / "results.json"
    main(["validate", str(folder), f"--json={results}"])
    found = json.loads(results.read_text())["metrics"]["eval/success"]
    assert found == max(float(row["eval/success"]) for row in rows if "eval/success" in row)


def test_other_demonstrations_do_not_continue_a_run(command_line, demonstrations, tmp_path, capsys):
    clone(command_line, demonstrations, "--data.total_steps=20")
    other = write_demonstrations(tmp_path / "other", num_episodes=3, seed=1)
    given = options_of(other, "--ckpt_path=last")
    code, message = fails(command_line, capsys, "fit", *given, **PLAIN)
    assert code == 2 and "other transitions" in message
    moved = tmp_path / "moved"
    os.symlink(demonstrations, moved)
    clone(command_line, moved, "--ckpt_path=last")
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["updates"] == 60
