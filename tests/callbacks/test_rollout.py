import time

import torch

from mtrl_lightning.checkpoints import load_checkpoint
from mtrl_lightning.envs import VectorEnv
from tests.helpers.altered_reach import SlowReach


def test_send_does_not_wait_for_the_environments():
    envs = VectorEnv(SlowReach(), [0, 1, 2], num_workers=1)
    observation, _ = envs.reset(seed=0)
    start = time.perf_counter()
    envs.send(observation * 0)
    sent = time.perf_counter() - start
    envs.receive()
    assert sent < 0.3 < 0.6 <= time.perf_counter() - start
    envs.close()


def test_threads_of_the_learner_can_be_chosen(command_line):
    before = torch.get_num_threads()
    other = 2 if before == 1 else 1
    short = ["--data.warmup_steps=60", "--data.total_steps=90"]
    command_line("fit", f"--data.learner_threads={other}", *short)
    assert torch.get_num_threads() == other
    torch.set_num_threads(before)


def test_a_step_is_counted_once_for_every_environment(command_line):
    command_line("fit", "--data.envs_per_task=4", "--data.total_steps=960")
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
        "repeated_steps": 0,
        "skipped_updates": 0,
    }
