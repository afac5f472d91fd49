import time

import pytest
import torch

from mtrl_lightning.algorithms import SAC
from mtrl_lightning.callbacks.checkpoint import load_checkpoint
from mtrl_lightning.envs import VectorEnv
from tests.helpers.altered_reach import SlowReach

SHORT = ("--rollout.total_steps=330", "--evaluation.envs_per_task=2")
"""Ten vector steps after the warm-up; ``events`` tells evaluations by their number of copies."""


@pytest.fixture
def events(monkeypatch):
    """Names of what happens while training, in order."""
    seen = []

    def record(owner, method):
        original = getattr(owner, method)

        def recorded(self, *args, **kwargs):
            if owner is SAC or self.task_E.size == 3:
                seen.append(method)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(owner, method, recorded)

    record(VectorEnv, "send")
    record(VectorEnv, "receive")
    record(SAC, "training_step")
    return seen


@pytest.mark.slow
def test_workers_step_while_the_learner_updates(command_line, events):
    command_line("fit", "--rollout.num_workers=1", *SHORT)
    warmup, training = events[:200], [e for e in events[200:]]
    assert warmup == ["send", "receive"] * 100
    for i in range(0, 30, 3):
        assert training[i : i + 3] == ["send", "training_step", "receive"]


def test_send_does_not_wait_for_the_environments():
    envs = VectorEnv(SlowReach(), [0, 1, 2], num_workers=1)
    observation, _ = envs.reset(seed=0)
    start = time.perf_counter()
    envs.send(observation * 0)
    sent = time.perf_counter() - start
    envs.receive()
    assert sent < 0.3 < 0.6 <= time.perf_counter() - start
    envs.close()


@pytest.mark.slow
def test_half_an_update_a_step_and_two_updates_a_step(command_line, events):
    command_line("fit", "--rollout.updates_per_step=0.5", "--name=half", *SHORT)
    assert events[200:205] == ["send", "receive", "send", "training_step", "receive"]
    events.clear()
    command_line("fit", "--rollout.updates_per_step=2", "--name=two", *SHORT)
    assert events[200:208] == ["send", "training_step", "receive", "training_step"] * 2


def test_a_burst_follows_the_warm_up_without_stepping(command_line, events):
    command_line("fit", "--rollout.warmup_updates=7", *SHORT)
    assert events[200:210] == ["training_step"] * 7 + ["send", "training_step", "receive"]


def test_threads_of_the_learner_can_be_chosen(command_line):
    before = torch.get_num_threads()
    other = 2 if before == 1 else 1
    short = ["--rollout.warmup_steps=60", "--rollout.total_steps=90"]
    command_line("fit", f"--rollout.learner_threads={other}", *short)
    assert torch.get_num_threads() == other
    torch.set_num_threads(before)


def test_a_step_is_counted_once_for_every_environment(command_line):
    command_line("fit", "--rollout.envs_per_task=4", "--rollout.total_steps=960")
    counters = load_checkpoint(command_line.folder() / "checkpoints" / "last.ckpt")[
        "mtrl_lightning"
    ]["counters"]
    assert counters == {
        "env_steps": 960,
        "vector_steps": 80,
        "updates": 55,
        "episodes": 48,
        "network_resets": 0,
        "worker_restarts": 0,
        "dropped_transitions": 0,
        "skipped_updates": 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    ["warmup_steps=0", "warmup_steps=900", "warmup_updates=-1", "updates_per_step=0", "window=0"],
)
def test_numbers_out_of_range_are_refused_before_the_run_has_a_folder(command_line, option):
    with pytest.raises(SystemExit) as exit_info:
        command_line("fit", f"--rollout.{option}")
    assert exit_info.value.code == 2
    assert not command_line.folder().exists()
