import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.callbacks.checkpoint import load_checkpoint
from mtrl_lightning.errors import ConfigurationError
from tests.helpers.command_line import SHORT
from tests.helpers.runs import checkpoint


def test_a_continued_run_goes_on_in_its_folder_with_all_of_its_state(command_line):
    command_line.finished()
    before = checkpoint(command_line)
    rows = command_line.rows()
    command_line("fit", "--ckpt_path=last", "--rollout.total_steps=1200")
    after = checkpoint(command_line)
    assert command_line.rows()[: len(rows)] == rows
    assert read_metrics(command_line.folder())["eval/success"][0][-2:] == [900, 1200]
    old, new = before["mtrl_lightning"]["counters"], after["mtrl_lightning"]["counters"]
    assert (old["env_steps"], new["env_steps"]) == (900, 1200)
    # no second warm-up: an update for every vector step
    assert new["updates"] - old["updates"] == 100
    assert new["episodes"] == 60
    windows = after["callbacks"]["rollout"]["collector"]["windows"]["windows"]
    assert [len(window) for window in windows] == [20, 20, 20]


@pytest.mark.slow
def test_an_older_checkpoint_drops_later_rows_only_when_asked_and_keeps_later_files(
    command_line, capsys, caplog
):
    command_line.finished(*SHORT, "--checkpoint.keep_last=-1")
    folder = command_line.folder() / "checkpoints"
    newer = (folder / "step_000000000180.ckpt").read_bytes()
    path = folder / "step_000000000120.ckpt"
    older = ["fit", *SHORT, f"--ckpt_path={path}", "--rollout.total_steps=150"]
    before = (command_line.folder() / "metrics.csv").read_bytes()
    with pytest.raises(SystemExit) as exit_info:
        command_line(*older)
    assert exit_info.value.code == 2
    refused = capsys.readouterr().err
    later = sum(int(row["env_steps"]) > 120 for row in command_line.rows())
    assert later == 3 and f"deletes the {later} later rows of" in refused
    assert "--overwrite_metrics" in refused and "after 120 steps" in refused
    assert (command_line.folder() / "metrics.csv").read_bytes() == before
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        command_line(*older, "--overwrite_metrics")
    assert f"the {later} rows later than the checkpoint" in caplog.text
    assert max(int(row["env_steps"]) for row in command_line.rows()) == 150
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["env_steps"] == 150
    assert (folder / "step_000000000180.ckpt").read_bytes() == newer
    path = folder / "step_000000000180.ckpt"
    command_line("fit", *SHORT, f"--ckpt_path={path}", "--rollout.total_steps=210")
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["env_steps"] == 210


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep_last", "expected"), [(1, [180]), (2, [120, 180]), (-1, [63, 120, 180]), (0, [180])]
)
def test_retention(command_line, keep_last, expected):
    command_line(
        "fit", *SHORT, f"--checkpoint.keep_last={keep_last}", "--checkpoint.keep_best=false"
    )
    folder = command_line.folder()
    steps = sorted(
        int(path.stem.split("_")[1]) for path in (folder / "checkpoints").glob("step_*.ckpt")
    )
    assert steps == expected
    listed = {
        chunk["file"]
        for path in (folder / "checkpoints").glob("step_*.ckpt")
        for chunk in load_checkpoint(path)["MultiTaskData"]["replay"]["chunks"]
    }
    assert {path.name for path in (folder / "replay").iterdir()} == listed


@pytest.mark.slow
def test_each_checkpoint_is_read_once_for_the_replay_files_that_it_needs(command_line, monkeypatch):
    read = []

    def load(path, verify):
        read.append(path)
        return load_checkpoint(path, verify)

    monkeypatch.setattr("mtrl_lightning.callbacks.checkpoint.load_checkpoint", load)
    command_line("fit", *SHORT, "--checkpoint.keep_last=-1")
    checkpoints = list((command_line.folder() / "checkpoints").glob("step_*.ckpt"))
    assert len(read) == len(checkpoints) >= 3


@pytest.mark.slow
def test_no_replay_file_is_deleted_while_a_checkpoint_cannot_be_read(command_line):
    command_line.finished(*SHORT)
    folder = command_line.folder()
    (folder / "checkpoints" / "step_000000000120.ckpt").write_bytes(b"no checkpoint")
    needed = folder / "replay" / "rows_that_only_this_checkpoint_lists.npy"
    needed.touch()
    longer = [*SHORT, "--rollout.total_steps=210", "--checkpoint.keep_last=-1"]
    with pytest.warns(UserWarning, match="step_000000000120"):
        command_line("fit", "--ckpt_path=last", *longer)
    assert needed.exists()


@pytest.mark.slow
def test_the_best_is_kept_though_newer_ones_come(command_line):
    best_metric = "--checkpoint.best_metric=eval/return/goal-1"  # which gets worse here
    command_line("fit", *SHORT, "--checkpoint.keep_last=1", best_metric)
    steps, returns = read_metrics(command_line.folder())["eval/return/goal-1"]
    best = checkpoint(command_line, which="best")["mtrl_lightning"]["counters"]["env_steps"]
    assert best == steps[returns.index(max(returns))] < 180
    names = {path.name for path in (command_line.folder() / "checkpoints").iterdir()}
    assert names == {"last.ckpt", "best.ckpt", f"step_{best:012d}.ckpt", "step_000000000180.ckpt"}


@pytest.mark.slow
def test_going_back_makes_last_and_best_those_of_the_new_branch(command_line, capsys):
    keep = "--checkpoint.keep_last=-1"
    command_line("fit", *SHORT, keep, "--rollout.total_steps=240")
    folder = command_line.folder() / "checkpoints"
    old = folder / "step_000000000120.ckpt"
    command_line("fit", *SHORT, keep, f"--ckpt_path={old}", "--overwrite_metrics")
    state = checkpoint(command_line)["callbacks"]["checkpoint"]
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["env_steps"] == 180
    best = checkpoint(command_line, which="best")["mtrl_lightning"]["counters"]["env_steps"]
    assert f"step_{best:012d}.ckpt" == state["best"][1] and best <= 180
    longer = ["--rollout.total_steps=252", "--overwrite_metrics"]
    for which in ("best", "last", folder / "step_000000000240.ckpt"):
        command_line("fit", *SHORT, f"--ckpt_path={which}", *longer)


@pytest.mark.slow
def test_the_saved_config_stays_that_of_a_new_run(command_line):
    command_line.finished(*SHORT)
    folder = command_line.folder()
    first = (folder / "config.yaml").read_bytes()
    command_line("fit", *SHORT, "--ckpt_path=last", "--rollout.total_steps=210")
    assert (folder / "config.yaml").read_bytes() == first
    saved = yaml.safe_load((folder / "config_from_000000000180.yaml").read_text())
    assert saved["ckpt_path"] is None and saved["rollout"]["total_steps"] == 210
    command_line(
        "fit",
        f"--config={folder / 'config_from_000000000180.yaml'}",
        "--name=new",
        configs=(),
        small=False,
    )
    assert read_metrics(command_line.folder("new"))["eval/success"][0][-1] == 210


def test_a_finished_run_is_left_as_it_is(command_line):
    command_line.finished()
    before = checkpoint(command_line)["mtrl_lightning"]["counters"]
    rows = command_line.rows()
    command_line("fit", "--ckpt_path=last")
    assert checkpoint(command_line)["mtrl_lightning"]["counters"] == before
    assert command_line.rows() == rows


@pytest.mark.slow
@pytest.mark.curves
def test_without_success_there_is_none_anywhere_and_best_goes_by_return(command_line, capsys):
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
    assert not [name for name in command_line.rows()[0] if "success" in name]
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


@pytest.mark.slow
def test_other_options_of_a_finished_run_need_more_steps(command_line, capsys):
    command_line("fit", *SHORT)
    folder = command_line.folder()
    before = files_of(folder)
    others = [*SHORT, "--evaluation.num_episodes=3", "--model.init_args.discount=0.9"]
    error = refused(command_line, capsys, *others)
    assert "evaluation.num_episodes 2 there and 3 here" in error
    assert "model.init_args.discount 0.99 there and 0.9 here" in error
    assert "Give a rollout.total_steps above 180" in error
    fewer = refused(command_line, capsys, *SHORT, "--rollout.total_steps=120")
    assert "total_steps 180 there and 120 here" in fewer
    command_line("fit", *SHORT, "--ckpt_path=last")
    assert files_of(folder) == before
    command_line("fit", *others, "--ckpt_path=last", "--rollout.total_steps=210")
    config = yaml.safe_load((folder / "config_from_000000000180.yaml").read_text())
    assert config["evaluation"]["num_episodes"] == 3
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["env_steps"] == 210


@pytest.mark.slow
def test_options_that_count_at_the_start_alone_are_refused(command_line, capsys):
    command_line.finished()
    before = files_of(command_line.folder())
    for option, text in (
        ("--seed_everything=5", "seed_everything 1 there and 5 here"),
        ("--rollout.warmup_updates=9", "rollout.warmup_updates 0 there and 9 here"),
        ("--model.init_args.temperature.init_args.initial=3", "initial 1.0 there and 3.0 here"),
    ):
        error = refused(command_line, capsys, option, "--rollout.total_steps=1200")
        assert "count only when a run starts" in error and text in error
    assert files_of(command_line.folder()) == before


def test_a_run_that_cannot_be_restored_keeps_its_files(command_line, capsys, monkeypatch):
    def fail(connector):
        raise ConfigurationError("no optimizer")

    command_line.finished()
    folder = command_line.folder()
    before = files_of(folder)
    monkeypatch.setattr(_CheckpointConnector, "restore_optimizers_and_schedulers", fail)
    longer = ["--rollout.total_steps=1200", "--model.init_args.discount=0.9"]
    assert "no optimizer" in refused(command_line, capsys, *longer)
    hparams = Path("hparams.yaml")  # Lightning writes the model's before it restores optimizers
    assert files_of(folder) | {hparams: before[hparams]} == before


def test_a_new_learning_rate_is_that_of_the_optimizer(command_line):
    command_line.finished()
    option = "--model.init_args.actor_optimizer.init_args.lr=0.01"
    command_line("fit", "--ckpt_path=last", "--rollout.total_steps=960", option)
    states = checkpoint(command_line)["optimizer_states"]
    assert [state["param_groups"][0]["lr"] for state in states] == [3e-4, 0.01, 3e-4]
    assert [float(state["state"][0]["step"]) for state in states] == [220, 220, 220]


def test_a_new_number_of_updates_counts_from_here(command_line):
    command_line.finished()
    command_line(
        "fit", "--ckpt_path=last", "--rollout.total_steps=960", "--rollout.updates_per_step=2"
    )
    assert checkpoint(command_line)["mtrl_lightning"]["counters"]["updates"] == 200 + 2 * 20


@pytest.mark.slow
def test_a_lost_replay_is_filled_on_top_of_the_steps_that_are_asked_for(command_line, capsys):
    command_line.finished(*SHORT, "--replay.save=false")
    assert not (command_line.folder() / "replay").exists()
    longer = [*SHORT, "--replay.save=false", "--ckpt_path=last", "--rollout.total_steps=210"]
    saved_without = r"empty replay, because the checkpoint was saved without it \(replay.save\)"
    with pytest.warns(UserWarning, match=saved_without):
        command_line("fit", *longer)
    counters = checkpoint(command_line)["mtrl_lightning"]["counters"]
    # 60 env steps as in the warm-up, and then an update for each of the 10 vector steps
    assert (counters["env_steps"], counters["updates"]) == (180 + 60 + 30, 40 + 10)
    error = refused(command_line, capsys, *longer, "--evaluation.num_episodes=3")
    assert "Give a rollout.total_steps above 210" in error
    again = ["--rollout.total_steps=270", "--rollout.warmup_steps=30"]
    command_line("fit", *longer, *again)
    counters = checkpoint(command_line)["mtrl_lightning"]["counters"]
    assert (counters["env_steps"], counters["updates"]) == (270 + 30 + 60, 50 + 20)
