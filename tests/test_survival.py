"""Faults through the command line: broken environments and a full disk."""

import errno
import os
from unittest.mock import Mock

import pytest

from mtrl_lightning.callbacks import EnvStepCheckpoint, read_metrics
from tests.helpers.command_line import SHORT, fails
from tests.helpers.runs import assert_same, checkpoint

FAULTY = ["--data.benchmark=tests.helpers.altered_reach.FaultyReach"]


def counters(command_line, name="run"):
    return checkpoint(command_line, name)["mtrl_lightning"]["counters"]


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
    options = [*FAULTY, "--data.warmup_steps=240", "--data.total_steps=420"]
    budget = ["--data.max_restarts=1", "--data.num_workers=2"]
    code, error = fails(command_line, capsys, "fit", *options, *budget)
    assert code == 1
    assert "task 'goal-1', step 7 of its episode: the observation" in error
    assert "after 1 restarts" in error
    saved = checkpoint(command_line)
    counts = saved["mtrl_lightning"]["counters"]
    assert 240 < counts["env_steps"] < 420 and counts["worker_restarts"] == 1
    states = saved["ReplayData"]["collector"]["per_env"]["envs"]
    assert [state["state"] is None for state in states] == [True, True, False]
    with pytest.warns(UserWarning, match="restart 1"):
        command_line("fit", *options, "--ckpt_path=last")
    after = counters(command_line)
    assert after["env_steps"] >= 420 and after["worker_restarts"] > 1


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_but_not_the_run(command_line, monkeypatch, capsys):
    save = EnvStepCheckpoint.save
    no_space = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))

    def full_at(env_steps):
        def save_unless_full(self, trainer, pl_module):
            with monkeypatch.context() as patch:
                if trainer.datamodule.counters.env_steps == env_steps:
                    patch.setattr(os, "fsync", no_space)
                save(self, trainer, pl_module)

        monkeypatch.setattr(EnvStepCheckpoint, "save", save_unless_full)

    keep_all = [*SHORT, "--checkpoint.save_top_k=-1", "--best.save_top_k=0"]
    command_line.finished(*keep_all)
    full_at(120)
    with pytest.warns(UserWarning, match="written"):
        command_line("fit", *keep_all, "--name=full")
    names = sorted(path.name for path in (command_line.folder("full") / "checkpoints").iterdir())
    assert names == ["env_steps=000000000063.ckpt", "env_steps=000000000180.ckpt", "last.ckpt"]
    one, other = checkpoint(command_line), checkpoint(command_line, "full")
    assert_same(one["state_dict"], other["state_dict"])
    full_at(210)  # the last one
    code, error = fails(command_line, capsys, "fit", *keep_all, "--data.total_steps=210")
    assert code == 2 and "free disk space" in error
