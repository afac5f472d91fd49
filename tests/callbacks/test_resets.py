"""Networks that begin anew, through the command line."""

from __future__ import annotations

import pytest
import torch

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.checkpoints import load_checkpoint
from tests.helpers.command_line import SHORT
from tests.helpers.runs import assert_same_end

RESETS = (
    "--resets.every=60",
    "--resets.times=2",
    "--model.init_args.reward_scale=mtrl_lightning.algorithms.MeanReward",
)
LONG = (
    *SHORT,
    "--rollout.total_steps=240",
    "--checkpoint.every=30",
    "--checkpoint.keep_last=-1",
)


@pytest.fixture
def resets(monkeypatch):
    """Return the environment steps of each reset and the mean rewards told before and at them."""
    seen, told = [], []
    reset, begin = SAC.reset_networks, SAC.begin_learning

    def note_reset(sac):
        seen.append(sac.counters.env_steps)
        reset(sac)

    def note_means(sac, mean_reward_R):
        told.append(mean_reward_R)
        begin(sac, mean_reward_R)

    monkeypatch.setattr(SAC, "reset_networks", note_reset)
    monkeypatch.setattr(SAC, "begin_learning", note_means)
    return seen, told


@pytest.mark.slow
def test_the_networks_begin_anew_on_schedule_and_scales_are_computed_at_once(command_line, resets):
    command_line("fit", *RESETS, *LONG)
    seen, told = resets
    assert seen == [120, 180], "two multiples of 60 after the warm-up"
    assert len(told) == 3
    assert all(mean.shape == (3,) and (mean != 0).all() for mean in told)


def actor_at(command_line, name, file):
    state = load_checkpoint(command_line.folder(name) / "checkpoints" / file)["state_dict"]
    return torch.cat([v.flatten() for n, v in state.items() if n.startswith("actor.")])


@pytest.mark.slow
def test_evaluation_and_best_checkpoint_at_a_reset_are_of_the_networks_before(command_line):
    # every evaluation is a new best, so that one is saved before the reset
    best = ("--checkpoint.best_metric=eval/return", "--checkpoint.best_mode=max")
    command_line("fit", *RESETS, *LONG, *best, "--name=whole")
    command_line("fit", *LONG, *RESETS[2:], *best, "--name=plain")
    same = [row for row in command_line.rows("plain") if float(row["env_steps"]) <= 120]
    assert len(same) >= 3 and command_line.rows("whole")[: len(same)] == same
    assert command_line.rows("whole") != command_line.rows("plain")
    folder = command_line.folder("whole") / "checkpoints"
    files = [path.name for path in folder.glob("step_000000000120*.ckpt")]
    plain = actor_at(command_line, "plain", "step_000000000120.ckpt")
    if "step_000000000120_after_reset.ckpt" in files:
        assert torch.equal(actor_at(command_line, "whole", "step_000000000120.ckpt"), plain)
    after = actor_at(command_line, "whole", sorted(files)[-1])
    assert not torch.equal(after, plain), "the last checkpoint is of the networks after the reset"
    later = [actor_at(command_line, name, "step_000000000150.ckpt") for name in ("whole", "plain")]
    assert not torch.equal(*later)


@pytest.mark.slow
def test_a_run_that_goes_on_with_its_first_schedule_makes_up_for_nothing(command_line, resets):
    command_line("fit", *LONG, RESETS[2], "--name=parts", "--rollout.total_steps=180")
    command_line("fit", *RESETS, *LONG, "--name=parts", "--ckpt_path=last")
    assert resets[0] == [], "240 is the end"
    command_line(
        "fit", *RESETS, *LONG, "--rollout.total_steps=300", "--name=parts", "--ckpt_path=last"
    )
    assert resets[0] == [240]


@pytest.mark.slow
def test_a_run_that_is_continued_at_a_reset_is_the_same_run(command_line):
    command_line("fit", *RESETS, *LONG, "--name=whole")
    command_line("fit", *RESETS, *LONG, "--rollout.total_steps=120", "--name=parts")
    command_line("fit", *RESETS, *LONG, "--name=parts", "--ckpt_path=last")
    assert_same_end(command_line, "whole", "parts")
