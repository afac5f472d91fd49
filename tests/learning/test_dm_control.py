"""Two bodies of the DeepMind Control Suite in one agent."""

import numpy as np
import pytest

from mtrl_lightning.callbacks import read_metrics
from mtrl_lightning.rollout import Evaluator

pytest.importorskip("dm_control")

from mtrl_lightning.envs import DMControl

pytestmark = pytest.mark.slow

TASKS = ["ball_in_cup-catch", "cartpole-swingup"]
"""Of 8 and 5 numbers of observation, 2 and 1 of action."""
REPEAT = 8


class RandomPolicy:
    def __init__(self, sizes):
        self._size = max(sizes)
        self._generator = np.random.default_rng(0)

    def act(self, observation_ED, task_E, mode):
        return self._generator.uniform(-1, 1, (len(observation_ED), self._size)).astype(np.float32)


def test_sac_learns_two_bodies_that_a_random_policy_cannot_control(command_line):
    benchmark = DMControl(TASKS, action_repeat=REPEAT)
    evaluator = Evaluator(benchmark, num_episodes=20, envs_per_task=10, num_workers=0)
    random = evaluator.evaluate(RandomPolicy(benchmark.spec.action_sizes)).return_T
    evaluator.close()
    assert max(random) < 200  # of 1000
    command_line(
        "fit",
        f"--data.benchmark.init_args.tasks={TASKS}",
        f"--data.benchmark.init_args.action_repeat={REPEAT}",
        "--data.batch_size=128",
        "--rollout.total_steps=24000",
        "--rollout.warmup_steps=2000",
        "--rollout.envs_per_task=2",
        "--rollout.num_workers=0",
        "--evaluation.every=24000",
        "--evaluation.num_workers=0",
        "--model.init_args.actor.init_args.width=128",
        "--model.init_args.critic.init_args.width=128",
        "--trainer.enable_progress_bar=false",
        "--seed_everything=2",
        configs=["dmcontrol_quickstart"],
        small=False,
    )
    curves = read_metrics(command_line.folder("dmcontrol_quickstart"))
    # with seeds 1 to 3: 0.84, 0.77, 0.91 and 0.83, 0.86, 0.35 on an AMD EPYC; on an Intel Xeon,
    # whose rounding differs, 0.90 and 0.21 with seed 1, 0.93 and 0.79 with seed 2
    assert curves["eval/score/ball_in_cup-catch"][1][-1] >= 0.5
    assert curves["eval/score/cartpole-swingup"][1][-1] >= 0.3
