"""The list of what happens after a vector step: its order, one more entry, a stop in its middle."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from mtrl_lightning.callbacks import (
    CheckpointCallback,
    EvaluationCallback,
    MetricsCallback,
    ResetCallback,
)
from mtrl_lightning.callbacks.common import SessionCallback
from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.run import loop
from mtrl_lightning.run.registered import StepAction
from tests.helpers.command_line import SHORT
from tests.helpers.runs import assert_same_end

EVERYTHING = (
    *SHORT,
    "--checkpoint.keep_last=-1",
    "--metrics.every=60",
    "--resets.every=60",
    "--model.init_args.reward_scale=mtrl_lightning.algorithms.MeanReward",
)
ACTIONS = {
    "evaluate": (EvaluationCallback, "evaluate_if_due"),
    "log_metrics": (MetricsCallback, "log_if_due"),
    "save_best": (CheckpointCallback, "save_if_best"),
    "reset_networks": (ResetCallback, "reset_if_due"),
    "save_last": (CheckpointCallback, "save_if_due"),
}


@pytest.mark.slow
def test_after_a_vector_step_everything_happens_in_one_order(command_line, monkeypatch):
    seen = []
    for name, (owner, method) in ACTIONS.items():
        original = getattr(owner, method)

        def noting(self, env_steps, at_end, name=name, original=original):
            seen.append((env_steps, name))
            original(self, env_steps, at_end)

        monkeypatch.setattr(owner, method, noting)
    command_line("fit", *EVERYTHING)
    for env_steps in range(63, 180, 3):
        assert [name for step, name in seen if step == env_steps] == [*ACTIONS]


class EpisodeCounts(SessionCallback):
    """One more thing after a vector step, with its state."""

    key = "episode_counts"

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        self.session.after_updates["count_episodes"] = StepAction(self.count)

    def count(self, env_steps, at_end):
        self.seen.append([env_steps, self.session.counters.episodes])

    def state_dict(self):
        return {"seen": self.seen}


@pytest.mark.slow
def test_one_more_thing_after_a_vector_step_is_one_entry_and_one_class(command_line, monkeypatch):
    order = (*loop.AFTER_UPDATES[:2], "count_episodes", *loop.AFTER_UPDATES[2:])
    monkeypatch.setattr(loop, "AFTER_UPDATES", order)
    command_line("fit", *SHORT, f"--trainer.callbacks={__name__}.EpisodeCounts")
    path = command_line.folder() / "checkpoints" / "last.ckpt"
    seen = torch.load(path, weights_only=True)["callbacks"]["episode_counts"]["seen"]
    assert [step for step, _ in seen] == list(range(63, 181, 3))
    assert seen[-1][1] == 9


def test_an_action_that_the_list_does_not_have_is_no_silent_mistake(command_line):
    with pytest.raises(AssertionError, match="count_episodes"):
        command_line("fit", f"--trainer.callbacks={__name__}.EpisodeCounts")


@pytest.mark.slow
@pytest.mark.parametrize("action", ["save_best", "reset_networks", "save_last"])
def test_a_run_that_is_stopped_in_the_middle_of_the_list_continues_there(
    command_line, monkeypatch, action
):
    owner, method = ACTIONS[action]
    original = getattr(owner, method)

    def interrupted(self, env_steps, at_end):
        if env_steps == 120:
            os.kill(os.getpid(), signal.SIGTERM)
            self.session.check_signals()
        original(self, env_steps, at_end)

    command_line.finished(*EVERYTHING, name="whole")
    monkeypatch.setattr(owner, method, interrupted)
    with pytest.raises(SystemExit) as exit_info:
        command_line("fit", *EVERYTHING, "--name=parts")
    assert exit_info.value.code == 143
    last = load_checkpoint(command_line.folder("parts") / "checkpoints" / "last.ckpt")
    assert last["mtrl_lightning"]["counters"]["env_steps"] == 120
    assert last["callbacks"]["rollout"]["next_call"] == action
    monkeypatch.setattr(owner, method, original)
    command_line("fit", *EVERYTHING, "--name=parts", "--ckpt_path=last")
    assert_same_end(command_line, "whole", "parts")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "mode"), [("eval/return", "max"), ("eval/return/goal-1", "min"), (None, "max")]
)
def test_what_is_best_can_be_chosen(command_line, metric, mode):
    options = [] if metric is None else [f"--checkpoint.best_metric={metric}"]
    command_line("fit", *SHORT, *options, f"--checkpoint.best_mode={mode}")
    name = metric or "eval/success"
    values = [(float(r[name]), int(r["env_steps"])) for r in command_line.rows() if r[name]]
    choose = max if mode == "max" else min
    wanted = choose(value for value, _ in values)
    first = next(step for value, step in values if value == wanted)
    best = load_checkpoint(command_line.folder() / "checkpoints" / "best.ckpt")
    assert best["mtrl_lightning"]["counters"]["env_steps"] == first
