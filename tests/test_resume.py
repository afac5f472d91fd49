import re
from pathlib import Path

import pytest
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.command_line import SHORT
from tests.helpers.runs import checkpoint


def test_resumed_run_continues_in_its_folder(command_line):
    command_line.finished()
    before = checkpoint(command_line)
    rows = command_line.rows()
    command_line("fit", "--ckpt_path=last", "--data.total_steps=1200")
    after = checkpoint(command_line)
    assert command_line.rows()[: len(rows)] == rows
    assert read_metrics(command_line.folder())["eval/success"][0][-2:] == [900, 1200]
    old, new = before["mtrl_lightning"]["counters"], after["mtrl_lightning"]["counters"]
    assert (old["env_steps"], new["env_steps"]) == (900, 1200)
    # no second warm-up: an update for every vector step
    assert new["updates"] - old["updates"] == 100
    assert new["episodes"] == 60
    windows = after["ReplayData"]["collector"]["windows"]["per_env"]["episodes"]
    assert [len(window) for window in windows] == [20, 20, 20]


@pytest.mark.slow
def test_an_older_checkpoint_drops_later_rows(command_line):
    command_line.finished(*SHORT, "--checkpoint.save_top_k=-1")
    folder = command_line.folder() / "checkpoints"
    path = folder / "env_steps=000000000120.ckpt"
    command_line("fit", *SHORT, f"--ckpt_path={path}", "--data.total_steps=150")
    assert max(int(row["env_steps"]) for row in command_line.rows()) == 150
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["env_steps"] == 150
    path = folder / "env_steps=000000000150.ckpt"
    command_line("fit", *SHORT, f"--ckpt_path={path}", "--data.total_steps=210")
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["env_steps"] == 210


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_top_k", "expected"), [(1, [180]), (2, [120, 180]), (-1, [63, 120, 180])]
)
def test_retention(command_line, save_top_k, expected):
    command_line("fit", *SHORT, f"--checkpoint.save_top_k={save_top_k}", "--best.save_top_k=0")
    folder = command_line.folder()
    steps = sorted(
        int(path.stem.split("=")[1]) for path in (folder / "checkpoints").glob("env_steps=*.ckpt")
    )
    assert steps == expected
    listed = {
        chunk["file"]
        for path in (folder / "checkpoints").glob("env_steps=*.ckpt")
        for chunk in load_checkpoint(path)["ReplayData"]["replay"]["all_ranks"]["chunks"]
    }
    assert {path.name for path in (folder / "replay").glob("*.npy")} == listed


def test_a_finished_run_is_left_as_it_is(command_line):
    command_line.finished()
    before = checkpoint(command_line)["mtrl_lightning"]["counters"]
    rows = command_line.rows()
    command_line("fit", "--ckpt_path=last")
    assert checkpoint(command_line)["mtrl_lightning"]["counters"] == before
    assert command_line.rows() == rows


@pytest.mark.slow
@pytest.mark.curves
def test_without_success_best_goes_by_return(command_line, capsys):
    command_line(
        "fit",
        *SHORT,
        "--data.benchmark=tests.helpers.altered_reach.NoSuccess",
        "--trainer.enable_progress_bar=true",
    )
    printed = capsys.readouterr()
    assert "success" not in printed.out and "success" not in printed.err
    assert re.search(r"task +return\ngoal-0 +-?\d+\.\d\n", printed.out)
    assert "eval return=" in printed.err
    assert not [name for row in command_line.rows() for name in row if "success" in name]
    assert (command_line.folder() / "curves.png").is_file()
    steps, returns = read_metrics(command_line.folder())["eval/return"]
    best = checkpoint(command_line, which="best")["mtrl_lightning"]["counters"]["env_steps"]
    assert best == steps[returns.index(max(returns))]


def files_of(folder):
    """Return what a run's files hold."""
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def refused(command_line, capsys, *options):
    with pytest.raises(SystemExit) as exit_info:
        command_line("fit", "--ckpt_path=last", *options)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def test_a_run_that_cannot_be_restored_keeps_its_files(command_line, capsys, monkeypatch):
    def fail(connector):
        raise ConfigurationError("no optimizer")

    command_line.finished()
    folder = command_line.folder()
    before = files_of(folder)
    monkeypatch.setattr(_CheckpointConnector, "restore_optimizers_and_schedulers", fail)
    longer = ["--data.total_steps=1200", "--model.init_args.discount=0.9"]
    assert "no optimizer" in refused(command_line, capsys, *longer)
    hparams = Path("hparams.yaml")  # Lightning writes the model's before it restores optimizers
    assert files_of(folder) | {hparams: before[hparams]} == before


def test_a_new_learning_rate_is_that_of_the_optimizer(command_line):
    command_line.finished()
    option = "--model.init_args.actor_optimizer.init_args.lr=0.01"
    command_line("fit", "--ckpt_path=last", "--data.total_steps=960", option)
    states = checkpoint(command_line)["optimizer_states"]
    assert [state["param_groups"][0]["lr"] for state in states] == [3e-4, 0.01, 3e-4]
    assert [float(state["state"][0]["step"]) for state in states] == [220, 220, 220]


def test_a_new_number_of_updates_counts_from_here(command_line):
    command_line.finished()
    command_line("fit", "--ckpt_path=last", "--data.total_steps=960", "--data.updates_per_step=2")
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["updates"] == 200 + 2 * 20


@pytest.mark.slow
def test_lost_replay_is_filled_on_top_of_the_steps(command_line):
    command_line.finished(*SHORT, "--data.save_replay=false")
    assert not (command_line.folder() / "replay").exists()
    longer = [*SHORT, "--data.save_replay=false", "--ckpt_path=last", "--data.total_steps=210"]
    with pytest.warns(UserWarning, match=r"empty replay.*data\.save_replay"):
        command_line("fit", *longer)
    counters = checkpoint(command_line)["mtrl_lightning"]["counters"]
    # 60 env steps as in the warm-up, and then an update for each of the 10 vector steps
    assert (counters["env_steps"], counters["updates"]) == (180 + 60 + 30, 40 + 10)
    again = ["--data.total_steps=270", "--data.warmup_steps=30"]
    command_line("fit", *longer, *again)
    counters = checkpoint(command_line)["mtrl_lightning"]["counters"]
    assert (counters["env_steps"], counters["updates"]) == (270 + 30 + 60, 50 + 20)
