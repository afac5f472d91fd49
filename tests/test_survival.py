"""Faults through the command line: broken environments, a full disk, damaged files."""

import errno
import os
import shutil
import signal
from contextlib import suppress

import numpy as np
import pytest

from mtrl_lightning.callbacks import EnvStepCheckpoint, EvaluationCallback, read_metrics
from tests.helpers.command_line import SHORT, fails
from tests.helpers.runs import assert_same, checkpoint

FAULTY = ["--data.benchmark=tests.helpers.altered_reach.FaultyReach"]
KEEP_ALL = [*SHORT, "--checkpoint.save_top_k=-1", "--best.save_top_k=0"]


def counters(command_line, name="run"):
    return checkpoint(command_line, name)["mtrl_lightning"]["counters"]


@pytest.fixture
def full_disk(monkeypatch):
    """Return a switch: while it is on, whatever waits for the disk is told that it is full."""
    fsync, switch = os.fsync, {"full": False}

    def failing(descriptor):
        if switch["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    return switch


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "workers"), [("nan", 0), ("raise", 2)])
def test_broken_environments_are_rebuilt_and_the_run_ends_well(command_line, fault, workers):
    overrides = [
        *FAULTY,
        "--data.warmup_steps=750",
        f"--data.benchmark.init_args.fault={fault}",
        f"--data.num_workers={workers}",
    ]
    with pytest.warns(UserWarning, match="goal-1"):
        command_line("fit", *overrides)
    counts = counters(command_line)
    # one task's environment fails at its 47th step from each start; all of its group lose that step
    lost = {0: 3, 2: 2}[workers]
    assert counts["env_steps"] == 900
    assert counts["worker_restarts"] == 6 + 1, "in training and in evaluations"
    assert counts["dropped_transitions"] == 6 * lost
    curves = read_metrics(command_line.folder())
    assert curves["fault/worker_restarts"][1][-1] == 6, "the last evaluation comes after the row"
    assert curves["fault/dropped_transitions"][1][-1] == counts["dropped_transitions"]
    manifest = checkpoint(command_line)["ReplayData"]["replay"]
    assert sum(manifest["per_env"]["added"]) == 900, "each valid transition is remembered, no other"


@pytest.mark.slow
def test_past_the_budget_the_run_saves_and_can_be_continued(command_line, capsys):
    options = [*FAULTY, "--data.total_steps=660"]
    budget = ["--data.max_restarts=2", "--data.num_workers=2"]
    code, error = fails(command_line, capsys, "fit", *options, *budget)
    assert code == 1
    assert "task 'goal-1', step 7 of its episode: the observation" in error
    assert "after 2 restarts" in error
    saved = checkpoint(command_line)
    counts = saved["mtrl_lightning"]["counters"]
    assert 300 < counts["env_steps"] < 660 and counts["worker_restarts"] == 2
    states = saved["ReplayData"]["collector"]["per_env"]["envs"]
    assert [state["state"] is None for state in states] == [True, True, False]
    with pytest.warns(UserWarning, match="restart 1"):
        command_line("fit", *options, "--ckpt_path=last")
    after = counters(command_line)
    assert after["env_steps"] >= 660 and after["worker_restarts"] > 2


def test_faults_in_the_warm_up_are_survived_and_counted_too(command_line, capsys):
    code, error = fails(command_line, capsys, "fit", *FAULTY, "--data.max_restarts=1")
    assert code == 1 and "after 1 restarts" in error
    assert counters(command_line)["updates"] == 0


def test_a_full_disk_costs_a_checkpoint_but_not_the_run(command_line, full_disk, monkeypatch):
    save = EnvStepCheckpoint.save

    def full_at_120(self, trainer, pl_module):
        full_disk["full"] = trainer.datamodule.counters.env_steps == 120
        try:
            save(self, trainer, pl_module)
        finally:
            full_disk["full"] = False

    command_line.finished(*KEEP_ALL)
    monkeypatch.setattr(EnvStepCheckpoint, "save", full_at_120)
    with pytest.warns(UserWarning, match="could not be written"):
        command_line("fit", *KEEP_ALL, "--name=full")
    names = sorted(path.name for path in (command_line.folder("full") / "checkpoints").iterdir())
    assert names == ["env_steps=000000000063.ckpt", "env_steps=000000000180.ckpt", "last.ckpt"]
    one, other = checkpoint(command_line), checkpoint(command_line, "full")
    assert_same(one["state_dict"], other["state_dict"])
    longer = [*SHORT, "--ckpt_path=last", "--data.total_steps=210"]
    command_line("fit", *longer, "--name=full")
    assert counters(command_line, "full")["env_steps"] == 210


@pytest.mark.slow
def test_an_end_that_cannot_be_saved_is_an_error(command_line, full_disk, capsys):
    full_disk["full"] = True
    code, error = fails(command_line, capsys, "fit", "--data.total_steps=303")
    assert code == 2 and "No space left" in error
    assert not list((command_line.folder() / "checkpoints").glob("*"))


@pytest.mark.slow
def test_last_falls_back_to_the_newest_undamaged_checkpoint(command_line):
    command_line.finished(*KEEP_ALL)
    shutil.copytree(command_line.folder(), command_line.folder("whole"))
    path = command_line.folder() / "checkpoints" / "env_steps=000000000180.ckpt"
    content = bytearray(path.read_bytes())
    weights = [v for k, v in checkpoint(command_line)["state_dict"].items() if k.endswith("weight")]
    content[content.index(weights[0].numpy().tobytes())] ^= 1
    path.write_bytes(content)  # last.ckpt is another name of this file
    with pytest.warns(UserWarning, match=r"env_steps=000000000120\.ckpt"):
        command_line("fit", *KEEP_ALL, "--ckpt_path=last")
    assert_same(
        checkpoint(command_line)["state_dict"], checkpoint(command_line, "whole")["state_dict"]
    )
    assert command_line.rows() == command_line.rows("whole")


@pytest.mark.slow
def test_the_last_n_transitions_are_saved_and_come_back(command_line):
    options = [*SHORT, "--data.save_last=90", "--data.chunk_mebibytes=0.00033"]
    command_line("fit", *options)
    manifest = checkpoint(command_line)["ReplayData"]["replay"]
    assert manifest["per_env"] == {"added": [60] * 3, "oldest": [30] * 3}
    with pytest.warns(UserWarning, match="last 90"):
        command_line("fit", *options, "--ckpt_path=last", "--data.total_steps=210")
    assert counters(command_line)["updates"] == 50
    assert checkpoint(command_line)["ReplayData"]["replay"]["per_env"]["oldest"] == [40] * 3


@pytest.mark.slow
def test_a_full_disk_is_not_written_to_at_every_step(command_line, full_disk, monkeypatch):
    full_disk["full"] = True
    saves = []
    monkeypatch.setattr(
        np, "save", lambda *args, real=np.save, **kwargs: (saves.append(1), real(*args, **kwargs))
    )
    with (
        pytest.warns(UserWarning, match="written"),
        suppress(SystemExit),
    ):
        command_line(
            "fit",
            "--data.chunk_mebibytes=0.00083",
            "--data.warmup_steps=840",
            "--checkpoint.every_n_env_steps=900",
        )
    assert len(saves) < 30
    assert not list((command_line.folder() / "replay").glob("*"))


@pytest.mark.slow
def test_an_interruption_after_a_best_evaluation_keeps_the_best(command_line, monkeypatch):
    options = [
        "--checkpoint.every_n_env_steps=100000",
        "--best.monitor=eval/return/goal-1",  # which gets worse here
        "--evaluation.every=60",
        "--data.warmup_steps=60",
        "--data.total_steps=240",
    ]
    command_line("fit", *options, "--name=whole")
    best = checkpoint(command_line, "whole", "best")["mtrl_lightning"]["counters"]["env_steps"]
    evaluate = EvaluationCallback.on_validation_epoch_end

    def evaluate_and_interrupt(self, trainer, pl_module):
        evaluate(self, trainer, pl_module)
        if pl_module.counters.env_steps == best:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(EvaluationCallback, "on_validation_epoch_end", evaluate_and_interrupt)
    with pytest.raises(SystemExit) as exit_info:
        command_line("fit", *options)
    assert exit_info.value.code == 143
    monkeypatch.setattr(EvaluationCallback, "on_validation_epoch_end", evaluate)
    if best < 240:
        command_line("fit", *options, "--ckpt_path=last")
    assert checkpoint(command_line, which="best")["mtrl_lightning"]["counters"]["env_steps"] == best
