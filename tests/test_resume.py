"""What a resumed run does besides continuing exactly: its files, and options that are changed."""

import pytest

from mtrl_lightning.callbacks import read_metrics
from tests.helpers.command_line import SHORT
from tests.helpers.runs import checkpoint


def counters(command_line):
    return checkpoint(command_line)["mtrl_lightning"]["counters"]


def test_resumed_run_continues_in_its_folder(command_line):
    command_line.finished()
    old, rows = counters(command_line), command_line.rows()
    command_line("fit", "--ckpt_path=last")  # it has ended
    assert counters(command_line) == old and command_line.rows() == rows
    command_line("fit", "--ckpt_path=last", "--data.total_steps=1200")
    assert command_line.rows()[: len(rows)] == rows
    assert read_metrics(command_line.folder())["eval/success"][0][-2:] == [900, 1200]
    new = counters(command_line)
    assert (old["env_steps"], new["env_steps"]) == (900, 1200)
    # no second warm-up: an update for every vector step
    assert new["updates"] - old["updates"] == 100
    assert new["episodes"] == 60
    windows = checkpoint(command_line)["ReplayData"]["collector"]["windows"]["per_env"]["episodes"]
    assert [len(window) for window in windows] == [20, 20, 20]


def test_changed_options_take_effect_from_here_on(command_line):
    command_line.finished()
    rate = "--model.init_args.actor_optimizer.init_args.lr=0.01"
    more = ["--data.total_steps=960", "--data.updates_per_step=2"]
    command_line("fit", "--ckpt_path=last", rate, *more)
    assert counters(command_line)["updates"] == 200 + 2 * 20
    states = checkpoint(command_line)["optimizer_states"]
    assert [state["param_groups"][0]["lr"] for state in states] == [3e-4, 0.01, 3e-4]
    assert [float(state["state"][0]["step"]) for state in states] == [240, 240, 240]


@pytest.mark.slow
def test_lost_replay_is_filled_on_top_of_the_steps(command_line):
    command_line.finished(*SHORT, "--data.save_replay=false")
    assert not (command_line.folder() / "replay").exists()
    longer = [*SHORT, "--data.save_replay=false", "--ckpt_path=last", "--data.total_steps=210"]
    with pytest.warns(UserWarning, match=r"empty replay.*data\.save_replay"):
        command_line("fit", *longer)
    found = counters(command_line)
    # 60 env steps as in the warm-up, and then an update for each of the 10 vector steps
    assert (found["env_steps"], found["updates"]) == (180 + 60 + 30, 40 + 10)
    command_line("fit", *longer, "--data.total_steps=270", "--data.warmup_steps=30")
    found = counters(command_line)
    assert (found["env_steps"], found["updates"]) == (270 + 30 + 60, 50 + 20)


@pytest.mark.slow
def test_last_transitions_are_saved_and_come_back(command_line):
    options = [*SHORT, "--data.save_last=90", "--data.chunk_mebibytes=0.00033"]
    command_line("fit", *options)
    manifest = checkpoint(command_line)["ReplayData"]["replay"]
    assert manifest["per_env"] == {"added": [60] * 3, "oldest": [30] * 3}
    with pytest.warns(UserWarning, match="last 90"):
        command_line("fit", *options, "--ckpt_path=last", "--data.total_steps=210")
    assert counters(command_line)["updates"] == 50
    assert checkpoint(command_line)["ReplayData"]["replay"]["per_env"]["oldest"] == [40] * 3
    end = ["--ckpt_path=last", "--data.total_steps=240", "--data.delete_replay_at_end=true"]
    command_line("fit", *options, *end)
    assert not any((command_line.folder() / "replay").glob("rows*"))


@pytest.mark.slow
def test_without_success_best_goes_by_return(command_line, capsys):
    command_line("fit", *SHORT, "--data.benchmark=tests.helpers.altered_reach.NoSuccess")
    assert "success" not in capsys.readouterr().out
    assert not [name for row in command_line.rows() for name in row if "success" in name]
    steps, returns = read_metrics(command_line.folder())["eval/return"]
    best = checkpoint(command_line, which="best")["mtrl_lightning"]["counters"]["env_steps"]
    assert best == steps[returns.index(max(returns))]
