"""Training episodes that end some steps after their first success."""

from functools import partial

import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from mtrl_lightning import read_metrics, train
from mtrl_lightning.algorithms import PPO
from mtrl_lightning.envs import GymnasiumTasks
from mtrl_lightning.envs.vector.success_limit import SuccessLimit
from mtrl_lightning.rollout import EndAfterSuccess
from tests.helpers.fakes import Line

HORIZON = 12


class Scheduled(Line):
    """It succeeds in given steps of an episode."""

    def __init__(self, *successes):
        super().__init__(success="success")
        self.successes = successes

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.steps += 1
        observation, *_ = super().step(action)
        return observation, 1.0, False, False, {"success": self.steps in self.successes}


@pytest.mark.parametrize(
    ("successes", "num_steps", "expected"),
    [
        ((), 3, HORIZON),
        ((4,), 0, 4),
        ((4, 6, 7), 3, 7),
        ((1,), 2, 3),
        ((10,), 3, HORIZON),
        ((HORIZON,), 0, HORIZON),
    ],
)
def test_episode_ends_some_steps_after_its_first_success(successes, num_steps, expected):
    env = SuccessLimit(TimeLimit(Scheduled(*successes), HORIZON), num_steps)
    # truncated: the last state's value is bootstrapped
    ends = [(False, False)] * (expected - 1) + [(False, True)]
    for of_episode in (ends, ends[:-1], ends):  # the second one is reset before its end
        env.reset()
        assert [env.step(np.zeros(1))[2:4] for _ in of_episode] == of_episode


def test_only_training_episodes_end_after_a_success(tmp_path):
    run = train(
        GymnasiumTasks({"a": partial(Scheduled, 1)}, horizon=HORIZON, has_success=True),
        partial(PPO, num_steps=20, num_minibatches=2),
        total_steps=40,
        data={"num_workers": 0, "extras": [EndAfterSuccess(3)]},
        evaluation={"every": 40, "num_episodes": 1, "num_workers": 0},
        root=tmp_path,
    )
    last = {name: values[-1] for name, (_, values) in read_metrics(run.folder).items()}
    assert last["rollout/length"] == 4
    assert last["eval/return"] == HORIZON, "the reward of each step is 1"
